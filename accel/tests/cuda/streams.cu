// SPDX-License-Identifier: Apache-2.0 OR MIT
// Streams, events, host functions, graphs: what comes after what.
#include "check.h"
#include <atomic>
#include <thread>

constexpr int n = 4096;

__global__ void scale(int *values, int by, int plus)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	values[i] = values[i] * by + plus;
}

static std::atomic<int> order, release;

static void CUDART_CB called(void *data)
{
	*static_cast<int *>(data) = ++order;
}

// Waits for the main thread: a host function must hold up its stream only.
static void CUDART_CB held(void *)
{
	while (!release)
		std::this_thread::yield();
}

static void events(int *values)
{
	cudaStream_t first, second;
	cudaEvent_t begun, ended;
	OK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
	OK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
	OK(cudaEventCreate(&begun));
	OK(cudaEventCreate(&ended));
	OK(cudaLaunchHostFunc(first, held, nullptr));
	OK(cudaEventRecord(begun, first));
	CLAIM(cudaEventQuery(begun) == cudaErrorNotReady);
	CLAIM(cudaStreamQuery(first) == cudaErrorNotReady);
	OK(cudaMemsetAsync(values, 0, n * sizeof(int), first));
	scale<<<n / 256, 256, 0, first>>>(values, 1, 3);
	OK(cudaEventRecord(ended, first));
	OK(cudaStreamWaitEvent(second, ended, 0));
	scale<<<n / 256, 256, 0, second>>>(values, 10, 4);
	int host[n], at[2] = {};
	OK(cudaLaunchHostFunc(second, called, &at[0]));
	release = 1;
	OK(cudaMemcpyAsync(host, values, sizeof host, cudaMemcpyDeviceToHost, second));
	OK(cudaLaunchHostFunc(second, called, &at[1]));
	OK(cudaStreamSynchronize(second));
	for (int value : host)
		CLAIM(value == 34);
	CLAIM(at[0] == 1 && at[1] == 2);
	float milliseconds = -1;
	OK(cudaEventElapsedTime(&milliseconds, begun, ended));
	CLAIM(milliseconds >= 0);
	OK(cudaEventDestroy(begun));
	OK(cudaEventDestroy(ended));
	OK(cudaStreamDestroy(first));
	OK(cudaStreamDestroy(second));
}

// The legacy default stream waits for blocking streams, and they wait for it.
static void default_stream(int *values)
{
	cudaStream_t stream;
	OK(cudaStreamCreate(&stream));
	for (int round = 0; round < 20; round++) {
		OK(cudaMemset(values, 0, n * sizeof(int)));
		scale<<<n / 256, 256, 0, stream>>>(values, 1, 5);
		scale<<<n / 256, 256>>>(values, 2, 0);
		scale<<<n / 256, 256, 0, stream>>>(values, 1, 1);
		int host[n];
		down(host, values, n);
		for (int value : host)
			CLAIM(value == 11);
	}
	OK(cudaStreamDestroy(stream));
}

static void captured(int *values)
{
	cudaStream_t stream, side;
	cudaEvent_t fork, join;
	OK(cudaStreamCreate(&stream));
	OK(cudaStreamCreate(&side));
	OK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
	OK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
	cudaGraph_t graph;
	cudaGraphExec_t executable;
	OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
	cudaStreamCaptureStatus status;
	OK(cudaStreamIsCapturing(stream, &status));
	CLAIM(status == cudaStreamCaptureStatusActive);
	scale<<<n / 512, 256, 0, stream>>>(values, 2, 1);
	OK(cudaEventRecord(fork, stream));
	OK(cudaStreamWaitEvent(side, fork, 0));
	scale<<<n / 512, 256, 0, side>>>(values + n / 2, 3, 1);
	OK(cudaEventRecord(join, side));
	scale<<<n / 512, 256, 0, stream>>>(values, 1, 1);
	OK(cudaStreamWaitEvent(stream, join, 0));
	static int calls;
	OK(cudaLaunchHostFunc(stream, [](void *data) { ++*static_cast<int *>(data); }, &calls));
	OK(cudaStreamEndCapture(stream, &graph));
	size_t nodes = 0;
	OK(cudaGraphGetNodes(graph, nullptr, &nodes));
	CLAIM(nodes == 4);
	OK(cudaGraphInstantiate(&executable, graph, 0));
	OK(cudaMemset(values, 0, n * sizeof(int)));
	for (int round = 0; round < 3; round++)
		OK(cudaGraphLaunch(executable, stream));
	OK(cudaStreamSynchronize(stream));
	int host[n];
	down(host, values, n);
	// x = 2 x + 2 three times; x = 3 x + 1 three times.
	for (int i = 0; i < n; i++)
		CLAIM(host[i] == (i < n / 2 ? 14 : 13));
	CLAIM(calls == 3);
	OK(cudaGraphExecDestroy(executable));
	OK(cudaGraphDestroy(graph));
}

static void built(int *values)
{
	cudaGraph_t graph;
	cudaGraphNode_t clear, kernel;
	OK(cudaGraphCreate(&graph, 0));
	cudaMemsetParams memset = {};
	memset.dst = values;
	memset.elementSize = 4;
	memset.width = n;
	memset.height = 1;
	memset.value = 7;
	OK(cudaGraphAddMemsetNode(&clear, graph, nullptr, 0, &memset));
	int by = 3, plus = 1;
	void *arguments[] = {&values, &by, &plus};
	cudaKernelNodeParams launch = {};
	launch.func = reinterpret_cast<void *>(scale);
	launch.gridDim = n / 256;
	launch.blockDim = 256;
	launch.kernelParams = arguments;
	OK(cudaGraphAddKernelNode(&kernel, graph, &clear, 1, &launch));
	cudaGraphExec_t executable;
	OK(cudaGraphInstantiate(&executable, graph, 0));
	OK(cudaGraphLaunch(executable, 0));
	int host[n];
	down(host, values, n);
	CLAIM(host[0] == 22 && host[n - 1] == 22);
	by = 5;
	OK(cudaGraphExecKernelNodeSetParams(executable, kernel, &launch));
	OK(cudaGraphLaunch(executable, 0));
	down(host, values, n);
	CLAIM(host[0] == 36);
	OK(cudaGraphExecDestroy(executable));
	OK(cudaGraphDestroy(graph));
}

int main()
{
	int *values = device<int>(n);
	events(values);
	default_stream(values);
	captured(values);
	built(values);
	puts("ok");
}
