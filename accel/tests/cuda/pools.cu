// SPDX-License-Identifier: Apache-2.0 OR MIT
// Memory that a stream allocates and frees in its order, from the device's pool and from the program's own.
#include "check.h"

__global__ void add(int *values, int what)
{
	values[threadIdx.x] += what;
}

static void CUDART_CB called(cudaStream_t, cudaError_t status, void *data)
{
	*static_cast<int *>(data) += status == cudaSuccess ? 1 : 100;
}

int main()
{
	int pools, calls = 0, host[64];
	OK(cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, 0));
	printf("pools: %d\n", pools);
	cudaStream_t stream;
	OK(cudaStreamCreate(&stream));
	cudaMemPool_t own, again, mine;
	OK(cudaDeviceGetDefaultMemPool(&own, 0));
	OK(cudaDeviceGetMemPool(&again, 0));
	CLAIM(own == again);
	unsigned long long keep = ~0ull, kept = 0;
	OK(cudaMemPoolSetAttribute(own, cudaMemPoolAttrReleaseThreshold, &keep));
	int reuse = 7;
	OK(cudaMemPoolGetAttribute(own, cudaMemPoolReuseAllowOpportunistic, &reuse));
	OK(cudaMemPoolGetAttribute(own, cudaMemPoolAttrUsedMemCurrent, &kept));
	printf("reuse: %d\n", reuse);
	for (int round = 0; round < 100; round++) {
		int *values;
		OK(cudaMallocAsync(&values, sizeof host, stream));
		OK(cudaMemsetAsync(values, 0, sizeof host, stream));
		add<<<1, 64, 0, stream>>>(values, round);
		OK(cudaMemcpyAsync(host, values, sizeof host, cudaMemcpyDeviceToHost, stream));
		OK(cudaStreamAddCallback(stream, called, &calls, 0));
		OK(cudaFreeAsync(values, stream));
		OK(cudaStreamSynchronize(stream));
		CLAIM(host[63] == round && calls == round + 1);
	}
	cudaMemPoolProps props = {};
	props.allocType = cudaMemAllocationTypePinned;
	props.location.type = cudaMemLocationTypeDevice;
	OK(cudaMemPoolCreate(&mine, &props));
	int *from;
	OK(cudaMallocFromPoolAsync(&from, 4096, mine, stream));
	OK(cudaMemsetAsync(from, 1, 4096, stream));
	OK(cudaMemcpyAsync(host, from, sizeof host, cudaMemcpyDeviceToHost, stream));
	OK(cudaStreamSynchronize(stream));
	CLAIM(host[0] == 0x01010101);
	OK(cudaFreeAsync(from, stream));
	printf("freed twice: %s\n", cudaGetErrorName(cudaFreeAsync(from, stream)));
	OK(cudaDeviceSetMemPool(0, mine));
	OK(cudaDeviceGetMemPool(&again, 0));
	CLAIM(again == mine);
	OK(cudaMallocAsync(&from, 4096, stream));
	OK(cudaFree(from));
	OK(cudaMemPoolTrimTo(mine, 0));
	OK(cudaMemPoolDestroy(mine));
	OK(cudaDeviceGetMemPool(&again, 0));
	CLAIM(again == own);
	printf("nothing: %s\n", cudaGetErrorName(cudaMallocAsync(&from, 1ull << 62, stream)));
	puts("ok");
}
