// SPDX-License-Identifier: Apache-2.0 OR MIT
// Cooperative groups: of a block, its tiles, those that are here, and the whole grid.
#include "check.h"
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>

namespace cg = cooperative_groups;

__global__ void tiles(int *out)
{
	cg::thread_block block = cg::this_thread_block();
	auto tile = cg::tiled_partition<8>(block);
	int sum = cg::reduce(tile, int(threadIdx.x), cg::plus<int>());
	int before = cg::exclusive_scan(tile, 1);
	auto odd = cg::binary_partition(tile, threadIdx.x & 1);
	int size = odd.size();
	if (threadIdx.x % 5 == 0) {
		auto here = cg::coalesced_threads();
		size += here.num_threads() * 100;
	}
	block.sync();
	out[threadIdx.x] = sum * 10000 + before * 1000 + size;
}

__global__ void whole(unsigned *cells, unsigned *out)
{
	cg::grid_group grid = cg::this_grid();
	atomicAdd(&cells[0], 1);
	grid.sync();
	unsigned seen = cells[0];
	grid.sync();
	if (grid.thread_rank() == 0)
		cells[0] = 0;
	grid.sync();
	out[grid.thread_rank()] = seen + cells[0];
}

int main()
{
	int *dt = device<int>(64), t[64];
	tiles<<<1, 64>>>(dt);
	OK(cudaGetLastError());
	down(t, dt, 64);
	for (int i = 0; i < 64; i++) {
		int first = i / 8 * 8, warp = i / 32, here = 0;
		for (int j = warp * 32; j < warp * 32 + 32; j++)
			here += j % 5 == 0;
		CLAIM(t[i] == (first * 8 + 28) * 10000 + i % 8 * 1000 + 4 + (i % 5 == 0 ? here * 100 : 0));
	}

	unsigned *cells = device<unsigned>(1), *dw = device<unsigned>(256), w[256];
	OK(cudaMemset(cells, 0, 4));
	void *arguments[] = {&cells, &dw};
	OK(cudaLaunchCooperativeKernel(reinterpret_cast<void *>(whole), 4, 64, arguments));
	down(w, dw, 256);
	for (unsigned value : w)
		CLAIM(value == 256);
	puts("ok");
}
