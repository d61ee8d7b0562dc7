// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * steady kernel: computes on the first device with a kernel, which is compiled, and says 'right'.
 * steady calls N: fills a buffer, copies it and says 'right'; then waits for the idle queue N times, a call each, and says 'done'.
 * steady forever: fills and copies until a call fails, and says 'failed' and the API's code.
 */
#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N 1024

static const char *source = "kernel void f(global int *a, int b) { int i = get_global_id(0); a[i] = i * 3 + b; }";

static cl_context context;
static cl_device_id device;
static cl_command_queue queue;
static cl_mem buffers[2];

/* Reads a buffer and compares it: element i is i * times + plus. The API's code, or 1: wrong results. */
static cl_int compare(cl_mem buffer, cl_int times, cl_int plus)
{
	static cl_int out[N];
	cl_int code = clEnqueueReadBuffer(queue, buffer, CL_TRUE, 0, sizeof(out), out, 0, NULL, NULL);

	for (cl_int i = 0; !code && i < N; i++)
		if (out[i] != i * times + plus)
			code = 1;
	return code;
}

static cl_int with_kernel(cl_int b)
{
	cl_program program;
	cl_kernel kernel;
	size_t size = N;
	cl_int code;

	program = clCreateProgramWithSource(context, 1, &source, NULL, &code);
	if (!code)
		code = clBuildProgram(program, 1, &device, "", NULL, NULL);
	if (!code)
		kernel = clCreateKernel(program, "f", &code);
	if (!code)
		code = clSetKernelArg(kernel, 0, sizeof(buffers[0]), &buffers[0]);
	if (!code)
		code = clSetKernelArg(kernel, 1, sizeof(b), &b);
	if (!code)
		code = clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &size, NULL, 0, NULL, NULL);
	return code ? code : compare(buffers[0], 3, b);
}

static cl_int with_copies(cl_int b)
{
	size_t size = N * sizeof(b);
	cl_int code = clEnqueueFillBuffer(queue, buffers[0], &b, sizeof(b), 0, size, 0, NULL, NULL);

	if (!code)
		code = clEnqueueCopyBuffer(queue, buffers[0], buffers[1], 0, 0, size, 0, NULL, NULL);
	return code ? code : compare(buffers[1], 0, b);
}

static cl_int set_up(void)
{
	cl_platform_id platform;
	cl_int code = clGetPlatformIDs(1, &platform, NULL);

	if (!code)
		code = clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL);
	if (!code)
		context = clCreateContext(NULL, 1, &device, NULL, NULL, &code);
	if (!code)
		queue = clCreateCommandQueue(context, device, 0, &code);
	for (int i = 0; !code && i < 2; i++)
		buffers[i] = clCreateBuffer(context, CL_MEM_READ_WRITE, N * sizeof(cl_int), NULL, &code);
	return code;
}

static void say(const char *what, cl_int code)
{
	if (code)
		printf("%s %d\n", what, code);
	else
		printf("%s\n", what);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";
	cl_int code = set_up();

	if (!code)
		code = !strcmp(mode, "kernel") ? with_kernel(7) : with_copies(7);
	say(code ? "failed" : "right", code);
	if (code)
		return 1;
	if (!strcmp(mode, "calls") && argc == 3) {
		for (long n = atol(argv[2]); !code && n > 0; n--)
			code = clFinish(queue);
		say(code ? "failed" : "done", code);
	}
	if (!strcmp(mode, "forever")) {
		for (cl_int b = 0; !code; b = (b + 1) % 1000)
			code = with_copies(b);
		say("failed", code);
	}
	return code != 0;
}
