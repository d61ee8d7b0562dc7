// SPDX-License-Identifier: Apache-2.0 OR MIT
// Sums by shuffles, scans in shared memory, histograms by atomics, and what a warp's lanes tell each other.
#include "check.h"
#include <vector>

constexpr int n = 10000, bins = 64;
extern __shared__ int dynamic[];

__device__ float warp_sum(float value)
{
	for (int offset = 16; offset; offset /= 2)
		value += __shfl_down_sync(~0u, value, offset);
	return value;
}

__global__ void sum(const float *values, float *out)
{
	__shared__ float partial[32];
	float mine = 0;
	for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
		mine += values[i];
	mine = warp_sum(mine);
	if (threadIdx.x % 32 == 0)
		partial[threadIdx.x / 32] = mine;
	__syncthreads();
	if (threadIdx.x < 32) {
		mine = warp_sum(threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0);
		if (threadIdx.x == 0)
			atomicAdd(out, mine);
	}
}

__global__ void scan(int *values, int count)
{
	dynamic[threadIdx.x] = values[threadIdx.x];
	for (int step = 1; step < count; step *= 2) {
		__syncthreads();
		int before = threadIdx.x >= step ? dynamic[threadIdx.x - step] : 0;
		__syncthreads();
		dynamic[threadIdx.x] += before;
	}
	values[threadIdx.x] = dynamic[threadIdx.x];
}

__global__ void histogram(const float *values, unsigned *out)
{
	__shared__ unsigned own[bins];
	for (int i = threadIdx.x; i < bins; i += blockDim.x)
		own[i] = 0;
	__syncthreads();
	for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
		atomicAdd(&own[int(values[i]) % bins], 1);
	__syncthreads();
	for (int i = threadIdx.x; i < bins; i += blockDim.x)
		atomicAdd(&out[i], own[i]);
}

// The largest value, by compare-and-swap on a double's bits.
__global__ void largest(const float *values, unsigned long long *out)
{
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i >= n)
		return;
	unsigned long long old = *out, expected;
	while (__longlong_as_double(old) < values[i]) {
		expected = old;
		old = atomicCAS(out, expected, __double_as_longlong(values[i]));
		if (old == expected)
			break;
	}
}

__global__ void lanes(unsigned *out)
{
	unsigned lane = threadIdx.x % 32;
	unsigned odd = __ballot_sync(~0u, lane & 1);
	unsigned same = __match_any_sync(~0u, lane / 8);
	unsigned active = 0;
	if (lane < 5)
		active = __activemask();
	int all = __syncthreads_and(threadIdx.x < blockDim.x), count = __syncthreads_count(lane == 3);
	out[threadIdx.x] = odd == 0xaaaaaaaau && same == 0xffu << lane / 8 * 8 && active == (lane < 5 ? 31 : 0) && all && count == blockDim.x / 32
		&& __reduce_max_sync(~0u, lane) == 31 && __popc(odd) == 16 && __ffs(odd) == 2 && __byte_perm(0x33221100, 0x77665544, 0x7531) == 0x77553311;
}

int main()
{
	std::vector<float> values(n);
	double expected = 0;
	unsigned counts[bins] = {};
	for (int i = 0; i < n; i++) {
		values[i] = i * 7919 % 4096;
		expected += values[i];
		counts[int(values[i]) % bins]++;
	}
	float *dv = device<float>(n), *ds = device<float>(1), total;
	up(dv, values.data(), n);
	OK(cudaMemset(ds, 0, sizeof(float)));
	sum<<<5, 256>>>(dv, ds);
	down(&total, ds, 1);
	CLAIM(total > expected * 0.99999 && total < expected * 1.00001);

	int line[512];
	for (int i = 0; i < 512; i++)
		line[i] = i % 5;
	int *dl = device<int>(512);
	up(dl, line, 512);
	scan<<<1, 512, sizeof line>>>(dl, 512);
	int scanned[512], so_far = 0;
	down(scanned, dl, 512);
	for (int i = 0; i < 512; i++)
		CLAIM(scanned[i] == (so_far += line[i]));

	unsigned *dh = device<unsigned>(bins), found[bins];
	OK(cudaMemset(dh, 0, sizeof found));
	histogram<<<4, 128>>>(dv, dh);
	down(found, dh, bins);
	for (int i = 0; i < bins; i++)
		CLAIM(found[i] == counts[i]);

	auto *dm = device<unsigned long long>(1);
	double most;
	OK(cudaMemset(dm, 0, 8));
	largest<<<(n + 255) / 256, 256>>>(dv, dm);
	OK(cudaMemcpy(&most, dm, 8, cudaMemcpyDeviceToHost));
	CLAIM(most == 4095);

	unsigned *dr = device<unsigned>(256), right[256];
	lanes<<<1, 256>>>(dr);
	down(right, dr, 256);
	for (unsigned r : right)
		CLAIM(r);
	puts("ok");
}
