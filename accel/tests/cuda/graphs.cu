// SPDX-License-Identifier: Apache-2.0 OR MIT
// Graphs made node by node, looked into, changed and launched.
#include "check.h"
#include <vector>

constexpr int n = 1024, side = 32;

__global__ void scale(int *values, int by, int plus)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	values[i] = values[i] * by + plus;
}

static cudaMemsetParams filled(int *values, int value)
{
	cudaMemsetParams fill = {};
	fill.dst = values;
	fill.elementSize = 4;
	fill.width = n;
	fill.height = 1;
	fill.value = value;
	return fill;
}

// A square of the first half of each row and column.
static cudaMemcpy3DParms corner(int *to, int *from)
{
	cudaMemcpy3DParms copy = {};
	copy.srcPtr = make_cudaPitchedPtr(from, side * sizeof(int), side * sizeof(int), side);
	copy.dstPtr = make_cudaPitchedPtr(to, side * sizeof(int), side * sizeof(int), side);
	copy.extent = make_cudaExtent(side / 2 * sizeof(int), side / 2, 1);
	copy.kind = cudaMemcpyDeviceToDevice;
	return copy;
}

static void expect(const char *what, int *values, int inside, int outside)
{
	static int host[n];
	down(host, values, n);
	for (int i = 0; i < n; i++)
		CLAIM(host[i] == (i / side < side / 2 && i % side < side / 2 ? inside : outside));
	printf("%s: %d %d\n", what, inside, outside);
}

int main()
{
	int *a = device<int>(n), *b = device<int>(n), by = 3, plus = 1;
	OK(cudaMemset(b, 0, n * sizeof(int)));
	cudaGraph_t graph, copy_of_it, whole;
	cudaGraphNode_t clear, kernel, nothing, move;
	OK(cudaGraphCreate(&graph, 0));
	cudaMemsetParams fill = filled(a, 7);
	OK(cudaGraphAddMemsetNode(&clear, graph, nullptr, 0, &fill));
	void *arguments[] = {&a, &by, &plus};
	cudaKernelNodeParams launch = {};
	launch.func = reinterpret_cast<void *>(scale);
	launch.gridDim = n / 256;
	launch.blockDim = 256;
	launch.kernelParams = arguments;
	OK(cudaGraphAddKernelNode(&kernel, graph, &clear, 1, &launch));
	OK(cudaGraphAddEmptyNode(&nothing, graph, &kernel, 1));
	cudaMemcpy3DParms copy = corner(b, a);
	OK(cudaGraphAddMemcpyNode(&move, graph, &nothing, 1, &copy));

	cudaGraphNode_t nodes[8];
	size_t count = 8;
	OK(cudaGraphGetNodes(graph, nodes, &count));
	CLAIM(count == 4 && nodes[0] == clear && nodes[1] == kernel && nodes[2] == nothing && nodes[3] == move && !nodes[4]);
	count = 8;
	OK(cudaGraphGetRootNodes(graph, nodes, &count));
	CLAIM(count == 1 && nodes[0] == clear);
	cudaGraphNodeType type;
	OK(cudaGraphNodeGetType(move, &type));
	CLAIM(type == cudaGraphNodeTypeMemcpy);

	cudaGraphExec_t executable, other;
	OK(cudaGraphInstantiate(&executable, graph, 0));
	OK(cudaGraphLaunch(executable, 0));
	expect("as built", b, 22, 0);
	by = 5;
	for (int round = 0; round < 3; round++) {
		plus = round;
		OK(cudaGraphExecKernelNodeSetParams(executable, kernel, &launch));
		OK(cudaGraphLaunch(executable, 0));
		expect("other arguments", b, 35 + round, 0);
	}
	fill = filled(a, 1);
	OK(cudaGraphExecMemsetNodeSetParams(executable, clear, &fill));
	int *c = device<int>(n);
	OK(cudaMemset(c, 0, n * sizeof(int)));
	copy = corner(c, a);
	OK(cudaGraphExecMemcpyNodeSetParams(executable, move, &copy));
	OK(cudaGraphLaunch(executable, 0));
	expect("other memory", c, 7, 0);
	expect("what it was before", b, 37, 0);

	// The graph itself is as it was built, but for what is set in it.
	by = 2;
	OK(cudaGraphKernelNodeSetParams(kernel, &launch));
	OK(cudaGraphClone(&copy_of_it, graph));
	cudaGraphExecUpdateResultInfo info;
	OK(cudaGraphExecUpdate(executable, copy_of_it, &info));
	OK(cudaGraphLaunch(executable, 0));
	expect("updated", b, 16, 0);

	OK(cudaGraphDestroyNode(move));
	count = 8;
	OK(cudaGraphGetNodes(graph, nodes, &count));
	CLAIM(count == 3);
	printf("another shape: %s\n", cudaGetErrorName(cudaGraphExecUpdate(executable, graph, &info)));
	cudaGetLastError();

	OK(cudaGraphCreate(&whole, 0));
	cudaGraphNode_t child, after;
	OK(cudaGraphAddChildGraphNode(&child, whole, nullptr, 0, copy_of_it));
	by = 1;
	int **into = &b;
	arguments[0] = into;
	OK(cudaGraphAddKernelNode(&after, whole, nullptr, 0, &launch));
	OK(cudaGraphAddDependencies(whole, &child, &after, nullptr, 1));
	OK(cudaGraphInstantiate(&other, whole, 0));
	OK(cudaGraphLaunch(other, 0));
	expect("a graph in a graph", b, 18, 2);

	// Another graph's nodes, and memory that is not the program's.
	printf("another's node: %s\n", cudaGetErrorName(cudaGraphAddEmptyNode(&after, whole, &kernel, 1)));
	fill.dst = reinterpret_cast<void *>(reinterpret_cast<size_t>(a) + (1ull << 40));
	printf("no memory: %s\n", cudaGetErrorName(cudaGraphAddMemsetNode(&after, whole, nullptr, 0, &fill)));
	cudaGetLastError();
	OK(cudaGraphExecDestroy(executable));
	OK(cudaGraphExecDestroy(other));
	OK(cudaGraphDestroy(graph));
	OK(cudaGraphDestroy(whole));

	// A graph that was captured is told like any other.
	cudaStream_t stream, beside;
	cudaEvent_t fork, join;
	OK(cudaStreamCreate(&stream));
	OK(cudaStreamCreate(&beside));
	OK(cudaEventCreate(&fork));
	OK(cudaEventCreate(&join));
	OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
	scale<<<4, 256, 0, stream>>>(a, 0, 1);
	OK(cudaEventRecord(fork, stream));
	OK(cudaStreamWaitEvent(beside, fork, 0));
	scale<<<4, 256, 0, beside>>>(b, 0, 2);
	OK(cudaEventRecord(join, beside));
	OK(cudaMemsetAsync(c, 0, n * sizeof(int), stream));
	OK(cudaStreamWaitEvent(stream, join, 0));
	scale<<<4, 256, 0, stream>>>(c, 1, 3);
	OK(cudaStreamEndCapture(stream, &graph));
	count = 0;
	OK(cudaGraphGetNodes(graph, nullptr, &count));
	CLAIM(count == 4);
	cudaGraphNode_t from[8], to[8];
	count = 8;
	OK(cudaGraphGetEdges(graph, from, to, nullptr, &count));
	printf("captured: %zu edges\n", count);
	OK(cudaGraphInstantiate(&executable, graph, 0));
	OK(cudaGraphLaunch(executable, stream));
	OK(cudaStreamSynchronize(stream));
	expect("launched", c, 3, 3);
	OK(cudaGraphExecDestroy(executable));
	OK(cudaGraphDestroy(graph));
	puts("ok");
}
