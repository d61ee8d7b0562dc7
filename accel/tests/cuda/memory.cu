// SPDX-License-Identifier: Apache-2.0 OR MIT
// Kinds of memory: constant, dynamic shared, pitched, pinned, registered, managed, stream-ordered; and what is out of bounds.
#include "check.h"
#include <cstring>
#include <vector>

__constant__ float coefficients[4] = {1, 2, 3, 4};
__device__ int counter = 40;
__device__ int table[3] = {7, 8, 9};
extern __shared__ char bytes[];

__global__ void polynomial(const float *x, float *y)
{
	float value = x[threadIdx.x];
	y[threadIdx.x] = ((coefficients[3] * value + coefficients[2]) * value + coefficients[1]) * value + coefficients[0];
	if (threadIdx.x == 0)
		counter += table[1];
}

__global__ void large_shared(int *out, int last)
{
	int *words = reinterpret_cast<int *>(bytes);
	if (threadIdx.x == 0)
		words[last] = 5;
	__syncthreads();
	out[threadIdx.x] = words[last];
}

__global__ void add_one(int *values, int pitch)
{
	int *row = reinterpret_cast<int *>(reinterpret_cast<char *>(values) + blockIdx.x * pitch);
	row[threadIdx.x]++;
}

int main()
{
	float x[32], y[32];
	for (int i = 0; i < 32; i++)
		x[i] = i;
	float *dx = device<float>(32), *dy = device<float>(32);
	up(dx, x, 32);
	polynomial<<<1, 32>>>(dx, dy);
	down(y, dy, 32);
	CLAIM(y[2] == 49);
	float other[4] = {0, 0, 1, 0};
	OK(cudaMemcpyToSymbol(coefficients, other, sizeof other));
	polynomial<<<1, 32>>>(dx, dy);
	down(y, dy, 32);
	CLAIM(y[5] == 25);
	int count;
	OK(cudaMemcpyFromSymbol(&count, counter, sizeof count));
	CLAIM(count == 56);

	int *out = device<int>(64), got[64], last = 96 * 1024 / 4 - 1;
	large_shared<<<1, 64, 96 * 1024>>>(out, last);
	CLAIM(cudaGetLastError() == cudaErrorInvalidValue);
	OK(cudaFuncSetAttribute(large_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 96 * 1024));
	large_shared<<<1, 64, 96 * 1024>>>(out, last);
	OK(cudaGetLastError());
	down(got, out, 64);
	CLAIM(got[63] == 5);

	// 10 rows of 100 integers.
	int *rows, host[10][100], back[10][100];
	size_t pitch;
	for (int i = 0; i < 1000; i++)
		host[i / 100][i % 100] = i;
	OK(cudaMallocPitch(&rows, &pitch, sizeof host[0], 10));
	OK(cudaMemcpy2D(rows, pitch, host, sizeof host[0], sizeof host[0], 10, cudaMemcpyHostToDevice));
	add_one<<<10, 100>>>(rows, pitch);
	OK(cudaMemcpy2D(back, sizeof back[0], rows, pitch, sizeof back[0], 10, cudaMemcpyDeviceToHost));
	CLAIM(back[0][0] == 1 && back[9][99] == 1000);

	int *pinned, *managed, *ordered;
	OK(cudaMallocHost(&pinned, 4096));
	memset(pinned, 0, 4096);
	add_one<<<1, 100>>>(pinned, 0);
	OK(cudaDeviceSynchronize());
	CLAIM(pinned[99] == 1 && pinned[100] == 0);
	OK(cudaMallocManaged(&managed, 4096));
	managed[3] = 5;
	add_one<<<1, 100>>>(managed, 0);
	OK(cudaDeviceSynchronize());
	CLAIM(managed[3] == 6);
	cudaPointerAttributes attributes;
	OK(cudaPointerGetAttributes(&attributes, managed));
	CLAIM(attributes.type == cudaMemoryTypeManaged);
	OK(cudaPointerGetAttributes(&attributes, pinned));
	CLAIM(attributes.type == cudaMemoryTypeHost);
	OK(cudaPointerGetAttributes(&attributes, host));
	CLAIM(attributes.type == cudaMemoryTypeUnregistered);
	std::vector<int> own(1024);
	OK(cudaHostRegister(own.data(), 4096, cudaHostRegisterDefault));
	add_one<<<1, 100>>>(own.data(), 0);
	OK(cudaDeviceSynchronize());
	CLAIM(own[7] == 1);
	OK(cudaHostUnregister(own.data()));
	OK(cudaMallocAsync(&ordered, 400, 0));
	OK(cudaMemsetAsync(ordered, 0, 400, 0));
	add_one<<<1, 100>>>(ordered, 0);
	OK(cudaMemcpyAsync(got, ordered, sizeof got, cudaMemcpyDeviceToHost, 0));
	OK(cudaFreeAsync(ordered, 0));
	OK(cudaStreamSynchronize(0));
	CLAIM(got[9] == 1);
	size_t free, total;
	OK(cudaMemGetInfo(&free, &total));
	CLAIM(free < total);
	OK(cudaFree(rows));
	CLAIM(cudaMalloc(&rows, total + 1) == cudaErrorMemoryAllocation);
	cudaGetLastError();

	// Out of bounds: the fault stays with the context.
	add_one<<<1, 100>>>(reinterpret_cast<int *>(16), 0);
	CLAIM(cudaDeviceSynchronize() == cudaErrorIllegalAddress);
	CLAIM(cudaMalloc(&rows, 16) == cudaErrorIllegalAddress);
	OK(cudaDeviceReset());
	OK(cudaMalloc(&rows, 16));
	puts("ok");
}
