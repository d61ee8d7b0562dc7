// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * An OpenCL program that measures what it is told to, a line of input each, and answers with a line of numbers: the result, then the
 * processor seconds that this process used for it. It runs natively and forwarded in turns, and doesn't know which.
 *
 *   finish N               nanoseconds of clFinish on an idle queue, median of N
 *   set-arg N              nanoseconds of a call that needs no answer, median of N bursts of 100
 *   launch N               nanoseconds from launch to launch of N empty kernels, until all have ended
 *   write SIZE PINNED N    MB/s of a blocking write and clFinish, median of N; PINNED 1: from memory of the driver
 *                          (CL_MEM_ALLOC_HOST_PTR, mapped)
 *   read SIZE PINNED N     MB/s of a blocking read
 *   memcpy SIZE N          MB/s
 *   large LOOPS N          milliseconds of a kernel that computes, on one processor (one work-group), median of N
 *   mix CALLS              nanoseconds a call: 26 % copies, 13 % launches, the rest small calls, as in the test of the Wormhole paper
 *   images DIMENSIONS N    nanoseconds to make two small images (16 pixels wide), write, copy and read them, and give them up; mean of N
 *   gemm N REPEAT          GFLOPS of CLBlast's product of two N by N matrices, median of REPEAT
 *   axpy N REPEAT          GB/s of CLBlast's y += a x of N numbers, median of REPEAT
 *   spin SECONDS           calls of the mix in that time
 *   busy SECONDS           kernels of a millisecond or so that end in that time, always two of them under way
 */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <clblast_c.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(call)                                                                                \
	do {                                                                                       \
		int status_ = (call);                                                              \
		if (status_) {                                                                     \
			fprintf(stderr, "%s: %d\n", #call, status_);                               \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

enum { SMALL = 256 };

static cl_context context;
static cl_command_queue queue;
static cl_kernel empty, descend, compute;
static cl_mem small;
static float numbers[SMALL];

static double now(clockid_t clock)
{
	struct timespec t;
	clock_gettime(clock, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static double median(double *values, long n)
{
	qsort(values, n, sizeof *values, ascending);
	return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

static cl_kernel kernel(cl_program program, const char *name)
{
	int e;
	cl_kernel k = clCreateKernel(program, name, &e);
	CHECK(e);
	return k;
}

/* A driver compiles a kernel once more for each size of its groups when it is launched first. That is no part of any measurement, as the sides
 * keep what they compiled for different times. */
static void warm_up(void)
{
	size_t one = 1, items = SMALL, group = SMALL / 4;
	int loops = 1;
	float rate = 0;

	CHECK(clSetKernelArg(descend, 1, sizeof rate, &rate));
	CHECK(clSetKernelArg(compute, 1, sizeof loops, &loops));
	CHECK(clEnqueueNDRangeKernel(queue, empty, 1, NULL, &one, NULL, 0, NULL, NULL));
	CHECK(clEnqueueNDRangeKernel(queue, descend, 1, NULL, &items, NULL, 0, NULL, NULL));
	CHECK(clEnqueueNDRangeKernel(queue, compute, 1, NULL, &items, &items, 0, NULL, NULL));
	CHECK(clEnqueueNDRangeKernel(queue, compute, 1, NULL, &items, &group, 0, NULL, NULL));
	CHECK(clFinish(queue));
}

static void set_up(void)
{
	static const char *source =
		"kernel void empty(global float *w) { }\n"
		"kernel void descend(global float *w, float rate) { int i = get_global_id(0); w[i] -= rate * w[i]; }\n"
		"kernel void compute(global float *w, int loops) {\n"
		"	float x = w[get_global_id(0)];\n"
		"	for (int i = 0; i < loops; i++) x = x * 0.999f + 0.001f;\n"
		"	w[get_global_id(0)] = x;\n"
		"}\n";
	cl_platform_id platform;
	cl_device_id device;
	int e;

	CHECK(clGetPlatformIDs(1, &platform, NULL));
	CHECK(clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL));
	context = clCreateContext(NULL, 1, &device, NULL, NULL, &e);
	CHECK(e);
	queue = clCreateCommandQueueWithProperties(context, device, NULL, &e);
	CHECK(e);
	cl_program program = clCreateProgramWithSource(context, 1, &source, NULL, &e);
	CHECK(e);
	CHECK(clBuildProgram(program, 0, NULL, NULL, NULL, NULL));
	empty = kernel(program, "empty");
	descend = kernel(program, "descend");
	compute = kernel(program, "compute");
	small = clCreateBuffer(context, 0, sizeof numbers, NULL, &e);
	CHECK(e);
	CHECK(clEnqueueWriteBuffer(queue, small, CL_TRUE, 0, sizeof numbers, numbers, 0, NULL, NULL));
	CHECK(clSetKernelArg(empty, 0, sizeof small, &small));
	CHECK(clSetKernelArg(descend, 0, sizeof small, &small));
	CHECK(clSetKernelArg(compute, 0, sizeof small, &small));
	warm_up();
}

static double finish(long n)
{
	double *times = calloc(n, sizeof *times);
	for (long i = 0; i < n; i++) {
		double begun = now(CLOCK_MONOTONIC);
		CHECK(clFinish(queue));
		times[i] = now(CLOCK_MONOTONIC) - begun;
	}
	double result = median(times, n);
	free(times);
	return result;
}

static double set_arg(long n)
{
	double *times = calloc(n, sizeof *times);
	for (long i = 0; i < n; i++) {
		float rate = i;
		double begun = now(CLOCK_MONOTONIC);
		for (int j = 0; j < 100; j++)
			CHECK(clSetKernelArg(descend, 1, sizeof rate, &rate));
		times[i] = (now(CLOCK_MONOTONIC) - begun) / 100;
		CHECK(clFinish(queue));
	}
	double result = median(times, n);
	free(times);
	return result;
}

static double launch(long n)
{
	size_t one = 1;
	double begun = now(CLOCK_MONOTONIC);
	for (long i = 0; i < n; i++)
		CHECK(clEnqueueNDRangeKernel(queue, empty, 1, NULL, &one, NULL, 0, NULL, NULL));
	CHECK(clFinish(queue));
	return (now(CLOCK_MONOTONIC) - begun) / n;
}

static double transfer(int writes, size_t size, int pinned, long n)
{
	int e;
	double *times = calloc(n, sizeof *times);
	cl_mem device = clCreateBuffer(context, 0, size, NULL, &e), host = NULL;
	CHECK(e);
	void *memory;
	if (pinned) {
		host = clCreateBuffer(context, CL_MEM_ALLOC_HOST_PTR, size, NULL, &e);
		CHECK(e);
		memory = clEnqueueMapBuffer(queue, host, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 0, size, 0, NULL, NULL, &e);
		CHECK(e);
	} else {
		memory = malloc(size);
	}
	memset(memory, 1, size);
	for (long i = -1; i < n; i++) {
		double begun = now(CLOCK_MONOTONIC);
		if (writes) {
			CHECK(clEnqueueWriteBuffer(queue, device, CL_TRUE, 0, size, memory, 0, NULL, NULL));
			/* It may return before the device has it. */
			CHECK(clFinish(queue));
		} else {
			CHECK(clEnqueueReadBuffer(queue, device, CL_TRUE, 0, size, memory, 0, NULL, NULL));
		}
		if (i >= 0)
			times[i] = now(CLOCK_MONOTONIC) - begun;
	}
	if (pinned) {
		CHECK(clEnqueueUnmapMemObject(queue, host, memory, 0, NULL, NULL));
		CHECK(clFinish(queue));
		CHECK(clReleaseMemObject(host));
	} else {
		free(memory);
	}
	CHECK(clReleaseMemObject(device));
	double result = size / median(times, n) * 1e3;
	free(times);
	return result;
}

static double copy(size_t size, long n)
{
	double *times = calloc(n, sizeof *times);
	char *from = malloc(size), *volatile to = malloc(size);
	memset(from, 1, size);
	memset(to, 2, size);
	for (long i = 0; i < n; i++) {
		double begun = now(CLOCK_MONOTONIC);
		memcpy(to, from, size);
		times[i] = now(CLOCK_MONOTONIC) - begun;
	}
	free(from);
	free(to);
	double result = size / median(times, n) * 1e3;
	free(times);
	return result;
}

static double large(int loops, long n)
{
	double *times = calloc(n, sizeof *times);
	size_t items = SMALL;
	CHECK(clSetKernelArg(compute, 1, sizeof loops, &loops));
	for (long i = 0; i < n; i++) {
		double begun = now(CLOCK_MONOTONIC);
		CHECK(clEnqueueNDRangeKernel(queue, compute, 1, NULL, &items, &items, 0, NULL, NULL));
		CHECK(clFinish(queue));
		times[i] = (now(CLOCK_MONOTONIC) - begun) / 1e6;
	}
	double result = median(times, n);
	free(times);
	return result;
}

static cl_mem filled(size_t count)
{
	const float one = 1;
	int e;
	cl_mem b = clCreateBuffer(context, 0, count * sizeof one, NULL, &e);
	CHECK(e);
	CHECK(clEnqueueFillBuffer(queue, b, &one, sizeof one, 0, count * sizeof one, 0, NULL, NULL));
	return b;
}

/* matrix: a product of N by N, otherwise a sum of N. Operations, or bytes, a nanosecond. */
static double blas(int matrix, size_t n, long repeat)
{
	double *times = calloc(repeat + 1, sizeof *times);
	size_t count = matrix ? n * n : n;
	cl_mem a = filled(count), b = filled(count), c = filled(count);
	/* Kernels are compiled in the first turn, which doesn't count. */
	for (long i = 0; i <= repeat; i++) {
		double begun = now(CLOCK_MONOTONIC);
		if (matrix)
			CHECK(CLBlastSgemm(CLBlastLayoutRowMajor, CLBlastTransposeNo, CLBlastTransposeNo, n, n, n, 1, a, 0, n, b, 0, n, 0, c, 0, n, &queue,
					   NULL));
		else
			CHECK(CLBlastSaxpy(n, 0.5f, a, 0, 1, b, 0, 1, &queue, NULL));
		CHECK(clFinish(queue));
		times[i] = now(CLOCK_MONOTONIC) - begun;
	}
	double work = matrix ? 2.0 * n * n * n : 3.0 * n * sizeof(float);
	double result = work / median(times + 1, repeat);
	CHECK(clReleaseMemObject(a));
	CHECK(clReleaseMemObject(b));
	CHECK(clReleaseMemObject(c));
	free(times);
	return result;
}

/* 100 calls: 26 copies (half of them reads), 13 launches, 61 small ones. */
static void hundred(void)
{
	size_t n = SMALL;
	cl_uint args;
	for (int i = 0; i < 13; i++) {
		float rate = 0.01f * i;
		CHECK(clEnqueueWriteBuffer(queue, small, CL_TRUE, 0, sizeof numbers, numbers, 0, NULL, NULL));
		CHECK(clSetKernelArg(descend, 0, sizeof small, &small));
		CHECK(clSetKernelArg(descend, 1, sizeof rate, &rate));
		CHECK(clEnqueueNDRangeKernel(queue, descend, 1, NULL, &n, NULL, 0, NULL, NULL));
		CHECK(clRetainMemObject(small));
		CHECK(clReleaseMemObject(small));
		CHECK(clEnqueueReadBuffer(queue, small, CL_TRUE, 0, sizeof numbers, numbers, 0, NULL, NULL));
	}
	for (int i = 0; i < 9; i++)
		CHECK(clGetKernelInfo(descend, CL_KERNEL_NUM_ARGS, sizeof args, &args, NULL));
}

static double mix(long calls)
{
	long done = 0;
	double begun = now(CLOCK_MONOTONIC);
	for (; done < calls; done += 100)
		hundred();
	CHECK(clFinish(queue));
	return (now(CLOCK_MONOTONIC) - begun) / done;
}

static double images(int dimensions, long n)
{
	cl_image_format format = {CL_RGBA, CL_UNSIGNED_INT8};
	cl_image_desc desc = {.image_width = 16, .image_height = 16};
	size_t origin[3] = {0}, region[3] = {16, 16, 1};
	char bytes[16 * 16 * 4 * 4];
	double begun;
	cl_int code;

	desc.image_type = dimensions == 3 ? CL_MEM_OBJECT_IMAGE3D : CL_MEM_OBJECT_IMAGE2D;
	if (dimensions == 3)
		desc.image_depth = region[2] = 4;
	memset(bytes, 7, sizeof bytes);
	begun = now(CLOCK_MONOTONIC);
	for (long i = 0; i < n; i++) {
		cl_mem from = clCreateImage(context, 0, &format, &desc, NULL, &code);
		CHECK(code);
		cl_mem to = clCreateImage(context, 0, &format, &desc, NULL, &code);
		CHECK(code);
		CHECK(clEnqueueWriteImage(queue, from, CL_TRUE, origin, region, 0, 0, bytes, 0, NULL, NULL));
		CHECK(clEnqueueCopyImage(queue, from, to, origin, origin, region, 0, NULL, NULL));
		CHECK(clEnqueueReadImage(queue, to, CL_TRUE, origin, region, 0, 0, bytes, 0, NULL, NULL));
		CHECK(clReleaseMemObject(from));
		CHECK(clReleaseMemObject(to));
	}
	return (now(CLOCK_MONOTONIC) - begun) / n;
}

static double spin(double seconds)
{
	double done = 0, end = now(CLOCK_MONOTONIC) + seconds * 1e9;
	for (; now(CLOCK_MONOTONIC) < end; done += 100)
		hundred();
	return done;
}

static double busy(double seconds)
{
	double done = 0, end = now(CLOCK_MONOTONIC) + seconds * 1e9;
	size_t items = SMALL, group = SMALL / 4;
	int loops = 3000;
	cl_event before, last;

	CHECK(clSetKernelArg(compute, 1, sizeof loops, &loops));
	CHECK(clEnqueueNDRangeKernel(queue, compute, 1, NULL, &items, &group, 0, NULL, &before));
	for (; now(CLOCK_MONOTONIC) < end; done++, before = last) {
		CHECK(clEnqueueNDRangeKernel(queue, compute, 1, NULL, &items, &group, 0, NULL, &last));
		CHECK(clFlush(queue));
		CHECK(clWaitForEvents(1, &before));
		CHECK(clReleaseEvent(before));
	}
	CHECK(clFinish(queue));
	CHECK(clReleaseEvent(before));
	return done;
}

int main(void)
{
	char line[200], what[20];
	double a, b, c;

	set_up();
	while (fgets(line, sizeof line, stdin)) {
		double result = -1, begun = now(CLOCK_PROCESS_CPUTIME_ID);
		a = b = c = 0;
		if (sscanf(line, "%19s %lf %lf %lf", what, &a, &b, &c) < 2)
			return 2;
		if (!strcmp(what, "finish"))
			result = finish(a);
		else if (!strcmp(what, "set-arg"))
			result = set_arg(a);
		else if (!strcmp(what, "launch"))
			result = launch(a);
		else if (!strcmp(what, "write") || !strcmp(what, "read"))
			result = transfer(what[0] == 'w', a, b != 0, c);
		else if (!strcmp(what, "memcpy"))
			result = copy(a, b);
		else if (!strcmp(what, "large"))
			result = large(a, b);
		else if (!strcmp(what, "gemm") || !strcmp(what, "axpy"))
			result = blas(what[0] == 'g', a, b);
		else if (!strcmp(what, "mix"))
			result = mix(a);
		else if (!strcmp(what, "images"))
			result = images(a, b);
		else if (!strcmp(what, "spin"))
			result = spin(a);
		else if (!strcmp(what, "busy"))
			result = busy(a);
		else
			return 2;
		printf("%.3f %.6f\n", result, (now(CLOCK_PROCESS_CPUTIME_ID) - begun) / 1e9);
		fflush(stdout);
	}
	return 0;
}
