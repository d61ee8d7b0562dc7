// SPDX-License-Identifier: Apache-2.0 OR MIT
// A product of matrices by tiles in shared memory.
#include "check.h"
#include <vector>

constexpr int tile = 16, n = 96;

__global__ void gemm(const float *a, const float *b, float *c)
{
	__shared__ float as[tile][tile], bs[tile][tile];
	int x = blockIdx.x * tile + threadIdx.x, y = blockIdx.y * tile + threadIdx.y;
	float sum = 0;
	for (int k = 0; k < n; k += tile) {
		as[threadIdx.y][threadIdx.x] = a[y * n + k + threadIdx.x];
		bs[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + x];
		__syncthreads();
		for (int i = 0; i < tile; i++)
			sum += as[threadIdx.y][i] * bs[i][threadIdx.x];
		__syncthreads();
	}
	c[y * n + x] = sum;
}

int main()
{
	std::vector<float> a(n * n), b(n * n), c(n * n);
	for (int i = 0; i < n * n; i++) {
		a[i] = i % 11 - 5;
		b[i] = i % 7 - 3;
	}
	float *da = device<float>(n * n), *db = device<float>(n * n), *dc = device<float>(n * n);
	up(da, a.data(), n * n);
	up(db, b.data(), n * n);
	gemm<<<dim3(n / tile, n / tile), dim3(tile, tile)>>>(da, db, dc);
	OK(cudaGetLastError());
	down(c.data(), dc, n * n);
	for (int y = 0; y < n; y++)
		for (int x = 0; x < n; x++) {
			float sum = 0;
			for (int k = 0; k < n; k++)
				sum += a[y * n + k] * b[k * n + x];
			CLAIM(c[y * n + x] == sum);
		}
	puts("ok");
}
