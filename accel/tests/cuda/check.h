// SPDX-License-Identifier: Apache-2.0 OR MIT
// What every program here needs: calls that must succeed, and claims about results.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

#define OK(call)                                                                                   \
	do {                                                                                       \
		cudaError_t code = (call);                                                         \
		if (code != cudaSuccess) {                                                         \
			printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorName(code)); \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

#define CLAIM(condition)                                                                           \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);             \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

template <class T> T *device(size_t count)
{
	T *at;
	OK(cudaMalloc(&at, count * sizeof(T)));
	return at;
}

template <class T> void up(T *to, const T *from, size_t count)
{
	OK(cudaMemcpy(to, from, count * sizeof(T), cudaMemcpyHostToDevice));
}

template <class T> void down(T *to, const T *from, size_t count)
{
	OK(cudaMemcpy(to, from, count * sizeof(T), cudaMemcpyDeviceToHost));
}
