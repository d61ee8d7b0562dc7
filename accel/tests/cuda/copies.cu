// SPDX-License-Identifier: Apache-2.0 OR MIT
// Copies of rectangles and cuboids between ordinary, pinned and device memory; and those that are out of bounds.
#include "check.h"
#include <cstring>
#include <vector>

static unsigned state = 1;

static unsigned char next()
{
	state = state * 1103515245u + 12345u;
	return state >> 16;
}

struct Memory {
	unsigned char *at;
	bool on_device;
	size_t bytes;
	std::vector<unsigned char> host() const
	{
		std::vector<unsigned char> all(bytes);
		OK(cudaMemcpy(all.data(), at, bytes, cudaMemcpyDefault));
		return all;
	}
};

static std::vector<Memory> memories(size_t bytes)
{
	std::vector<Memory> all;
	for (int kind = 0; kind < 3; kind++) {
		void *at;
		if (kind == 0)
			at = malloc(bytes);
		else if (kind == 1)
			OK(cudaMallocHost(&at, bytes));
		else
			OK(cudaMalloc(&at, bytes));
		std::vector<unsigned char> content(bytes);
		for (auto &byte : content)
			byte = next();
		OK(cudaMemcpy(at, content.data(), bytes, cudaMemcpyDefault));
		all.push_back({static_cast<unsigned char *>(at), kind == 2, bytes});
	}
	return all;
}

static cudaMemcpyKind kind(const Memory &to, const Memory &from)
{
	if (to.on_device)
		return from.on_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice;
	return from.on_device ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
}

// Width, height and depth, and each side's pitch and rows of a slice.
struct Shape {
	size_t width, height, depth, from_pitch, from_rows, to_pitch, to_rows;
};

static void cuboid(const Memory &to, const Memory &from, const Shape &s, bool unified, cudaStream_t stream)
{
	auto expected = to.host(), source = from.host();
	for (size_t z = 0; z < s.depth; z++)
		for (size_t y = 0; y < s.height; y++)
			memcpy(&expected[5 + (z * s.to_rows + y) * s.to_pitch], &source[3 + (z * s.from_rows + y) * s.from_pitch], s.width);
	cudaMemcpy3DParms copy = {};
	copy.srcPtr = make_cudaPitchedPtr(from.at, s.from_pitch, s.width, s.from_rows);
	copy.dstPtr = make_cudaPitchedPtr(to.at, s.to_pitch, s.width, s.to_rows);
	copy.srcPos = make_cudaPos(3, 0, 0);
	copy.dstPos = make_cudaPos(5, 0, 0);
	copy.extent = make_cudaExtent(s.width, s.height, s.depth);
	copy.kind = unified ? cudaMemcpyDefault : kind(to, from);
	OK(stream ? cudaMemcpy3DAsync(&copy, stream) : cudaMemcpy3D(&copy));
	if (stream)
		OK(cudaStreamSynchronize(stream));
	CLAIM(to.host() == expected);
}

static void rectangle(const Memory &to, const Memory &from, const Shape &s, cudaStream_t stream)
{
	auto expected = to.host(), source = from.host();
	for (size_t y = 0; y < s.height; y++)
		memcpy(&expected[y * s.to_pitch], &source[y * s.from_pitch], s.width);
	if (stream) {
		OK(cudaMemcpy2DAsync(to.at, s.to_pitch, from.at, s.from_pitch, s.width, s.height, kind(to, from), stream));
		OK(cudaStreamSynchronize(stream));
	} else {
		OK(cudaMemcpy2D(to.at, s.to_pitch, from.at, s.from_pitch, s.width, s.height, kind(to, from)));
	}
	CLAIM(to.host() == expected);
}

static void refused(const char *what, cudaError_t code)
{
	printf("%s: %s\n", what, cudaGetErrorName(code));
	cudaGetLastError();
}

int main()
{
	cudaStream_t stream;
	OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	const Shape shapes[] = {
		{1, 1, 1, 8, 1, 8, 1},
		{100, 7, 3, 104, 7, 128, 9},
		{33, 40, 5, 50, 44, 33, 40},
		{64, 16, 1, 64, 16, 100, 16},
	};
	auto from = memories(16384), to = memories(16384);
	for (const auto &shape : shapes)
		for (const auto &source : from)
			for (const auto &target : to) {
				cuboid(target, source, shape, false, nullptr);
				cuboid(target, source, shape, true, stream);
				rectangle(target, source, shape, nullptr);
				rectangle(target, source, shape, stream);
			}
	puts("small");

	// More than a piece of any window, in rows that are short, and in rows that are longer than one.
	const size_t large = 12 << 20;
	auto wide_from = memories(large), wide_to = memories(large);
	const Shape wide[] = {{(3 << 20) + 1, 3, 1, (3 << 20) + 16, 3, (3 << 20) + 2, 3}, {1000, 5000, 2, 1024, 5001, 1001, 5000}};
	for (const auto &shape : wide) {
		cuboid(wide_to[2], wide_from[0], shape, false, nullptr);
		cuboid(wide_to[0], wide_from[2], shape, false, nullptr);
		cuboid(wide_to[2], wide_from[1], shape, false, stream);
		cuboid(wide_to[2], wide_from[2], shape, false, stream);
	}
	puts("large");

	unsigned char *small, host[4096];
	OK(cudaMalloc(&small, 4096));
	refused("a row too many", cudaMemcpy2D(small, 64, host, 64, 64, 65, cudaMemcpyHostToDevice));
	refused("rows that overlap", cudaMemcpy2D(small, 32, host, 64, 64, 2, cudaMemcpyHostToDevice));
	refused("to nowhere", cudaMemcpy2D(nullptr, 64, host, 64, 64, 2, cudaMemcpyHostToDevice));
	refused("from beyond", cudaMemcpy2D(host, 64, small + 4096 - 64, 64, 64, 2, cudaMemcpyDeviceToHost));
	refused("beyond, unified", cudaMemcpy2D(small + 4096 - 64, 64, small, 64, 64, 2, cudaMemcpyDefault));
	refused("nothing", cudaMemcpy2D(small, 64, host, 64, 0, 2, cudaMemcpyHostToDevice));
	puts("ok");
}
