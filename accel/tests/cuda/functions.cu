// SPDX-License-Identifier: Apache-2.0 OR MIT
// Calls: recursion, virtual functions, printf, assertions; mathematics of the device against that of the host; halves.
#include "check.h"
#include <cmath>
#include <cuda_fp16.h>
#include <cuda_bf16.h>

__device__ __noinline__ int ackermann(int m, int n)
{
	return m == 0 ? n + 1 : n == 0 ? ackermann(m - 1, 1) : ackermann(m - 1, ackermann(m, n - 1));
}

struct Shape {
	virtual __device__ float area() const = 0;
};
struct Square : Shape {
	float side;
	__device__ Square(float side) : side(side) {}
	__device__ float area() const override { return side * side; }
};
struct Circle : Shape {
	float radius;
	__device__ Circle(float radius) : radius(radius) {}
	__device__ float area() const override { return 3 * radius * radius; }
};

__global__ void calls(int *numbers, float *areas)
{
	numbers[threadIdx.x] = ackermann(2, threadIdx.x % 8);
	Square square(threadIdx.x);
	Circle circle(threadIdx.x);
	const Shape *shape = threadIdx.x % 3 ? static_cast<const Shape *>(&square) : &circle;
	areas[threadIdx.x] = shape->area();
	if (threadIdx.x == 1)
		printf("%d %s %5.2f %llx %c%%\n", -threadIdx.x, "word", 1.25, 1ull << 40, 'c');
}

__global__ void mathematics(double *out, double x)
{
	float f = x;
	double values[] = {sin(x), cos(x), exp(x), log(x), pow(x, 1.7), tanh(x), cbrt(x), erf(x), tgamma(x), fmod(x, 0.7), sinf(f), expf(f), logf(f), powf(f, 1.7f), tanhf(f), atan2f(f, 2)};
	int i = threadIdx.x;
	out[i] = values[i];
}

__global__ void halves(float *out)
{
	__half2 pair = __floats2half2_rn(1.5f, -2.25f);
	pair = __hfma2(pair, pair, __float2half2_rn(0.5f));
	out[0] = __low2float(pair);
	out[1] = __high2float(pair);
	out[2] = __half2float(hexp(__float2half(1.0f)));
	out[3] = __bfloat162float(__float2bfloat16(3.14159f) * __float2bfloat16(2.0f));
	out[4] = __half2float(__float2half_rd(1.0f / 3)) < 1.0f / 3;
	out[5] = __hlt(__float2half(1), __float2half(2));
}

int main()
{
	int *dn = device<int>(64), numbers[64];
	float *da = device<float>(64), areas[64];
	calls<<<1, 64>>>(dn, da);
	OK(cudaDeviceSynchronize());
	down(numbers, dn, 64);
	down(areas, da, 64);
	for (int i = 0; i < 64; i++) {
		CLAIM(numbers[i] == 2 * (i % 8) + 3);
		CLAIM(areas[i] == (i % 3 ? i * i : 3 * i * i));
	}

	double x = 1.3, *dm = device<double>(16), m[16];
	mathematics<<<1, 16>>>(dm, x);
	down(m, dm, 16);
	double expected[] = {sin(x), cos(x), exp(x), log(x), pow(x, 1.7), tanh(x), cbrt(x), erf(x), tgamma(x), fmod(x, 0.7), sin(x), exp(x), log(x), pow(x, 1.7), tanh(x), atan2(x, 2)};
	for (int i = 0; i < 16; i++)
		CLAIM(fabs(m[i] - expected[i]) < (i < 10 ? 1e-14 : 1e-6) * fabs(expected[i]) * 4);

	float *dh = device<float>(6), h[6];
	halves<<<1, 1>>>(dh);
	down(h, dh, 6);
	CLAIM(h[0] == 2.75f && h[1] == 5.5625f && fabsf(h[2] - 2.71828f) < 0.002f && h[3] == 6.28125f && h[4] == 1 && h[5] == 1);
	puts("ok");
}
