// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * A training loop of many small kernels with the mix of the Wormhole paper's test: of 1.1 million calls 26 % copies, 13 % launches, the rest
 * small calls. Arguments: number of calls (default 1100000). Prints seconds and nanoseconds a call.
 */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define CHECK(call)                                                                                \
	do {                                                                                       \
		int status_ = (call);                                                              \
		if (status_) {                                                                     \
			fprintf(stderr, "%s: %d\n", #call, status_);                               \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

int main(int argc, char **argv)
{
	long calls = argc > 1 ? atol(argv[1]) : 1100000, done = 0;
	int e;
	cl_platform_id p;
	cl_device_id d;
	CHECK(clGetPlatformIDs(1, &p, NULL));
	CHECK(clGetDeviceIDs(p, CL_DEVICE_TYPE_ALL, 1, &d, NULL));
	cl_context c = clCreateContext(NULL, 1, &d, NULL, NULL, &e);
	CHECK(e);
	cl_command_queue q = clCreateCommandQueueWithProperties(c, d, NULL, &e);
	CHECK(e);
	const char *s = "kernel void step(global float *w, float rate) { int i = get_global_id(0); w[i] -= rate * w[i]; }";
	cl_program prog = clCreateProgramWithSource(c, 1, &s, NULL, &e);
	CHECK(clBuildProgram(prog, 0, NULL, NULL, NULL, NULL));
	cl_kernel k = clCreateKernel(prog, "step", &e);
	CHECK(e);
	float host[256];
	for (int i = 0; i < 256; i++)
		host[i] = i;
	cl_mem m = clCreateBuffer(c, 0, sizeof host, NULL, &e);
	CHECK(e);
	CHECK(clEnqueueWriteBuffer(q, m, CL_TRUE, 0, sizeof host, host, 0, NULL, NULL));
	size_t n = 256;
	cl_uint args;
	struct timespec a, b;
	clock_gettime(CLOCK_MONOTONIC, &a);
	while (done < calls) {
		/* 100 calls: 26 copies (half of them reads), 13 launches, 61 small ones. */
		for (int i = 0; i < 13; i++) {
			float rate = 0.01f * i;
			CHECK(clEnqueueWriteBuffer(q, m, CL_TRUE, 0, sizeof host, host, 0, NULL, NULL));
			CHECK(clSetKernelArg(k, 0, sizeof m, &m));
			CHECK(clSetKernelArg(k, 1, sizeof rate, &rate));
			CHECK(clEnqueueNDRangeKernel(q, k, 1, NULL, &n, NULL, 0, NULL, NULL));
			CHECK(clRetainMemObject(m));
			CHECK(clReleaseMemObject(m));
			CHECK(clEnqueueReadBuffer(q, m, CL_TRUE, 0, sizeof host, host, 0, NULL, NULL));
		}
		for (int i = 0; i < 9; i++)
			CHECK(clGetKernelInfo(k, CL_KERNEL_NUM_ARGS, sizeof args, &args, NULL));
		done += 100;
	}
	CHECK(clFinish(q));
	clock_gettime(CLOCK_MONOTONIC, &b);
	double t = (b.tv_sec - a.tv_sec) + (b.tv_nsec - a.tv_nsec) * 1e-9;
	printf("%ld calls in %.3f s, %.0f ns a call\n", done, t, t / done * 1e9);
	return 0;
}
