// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * A program of CUDA's driver API that measures what it is told to, a line of input each, and answers with a line of numbers: the result, then the
 * processor seconds that this process used for it. It runs on the device itself and forwarded in turns, and doesn't know which.
 *
 *   wait N                 nanoseconds of cuStreamSynchronize on an idle stream, median of N
 *   launch N               nanoseconds to launch an empty kernel, until the call returns, median of N bursts of 50
 *   launched N             nanoseconds from launch to launch of N empty kernels, until all have ended
 *   graph N                nanoseconds to launch a graph of ten empty kernels, until all of N have ended
 *   write SIZE PINNED N    MB/s of cuMemcpyHtoD, median of N; PINNED 1: from memory of cuMemHostAlloc
 *   read SIZE PINNED N     MB/s of cuMemcpyDtoH
 *   memcpy SIZE N          MB/s
 *   mix CALLS              nanoseconds a call: 26 % copies, 13 % launches, 49 % calls that set state for later kernels (events recorded and waited for),
 *                          12 % that ask for what the library knows (the current context), as in the test of the Wormhole paper
 *   load KERNELS NAME      milliseconds to load a module of so many kernels, whose text has a number in it, and to find one
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void *handle;

/* The functions, as cuda.h declares them. */
#define FUNCTIONS(X)                                                                               \
	X(cuInit, (unsigned))                                                                      \
	X(cuDeviceGet, (int *, int))                                                               \
	X(cuDevicePrimaryCtxRetain, (handle *, int))                                               \
	X(cuCtxSetCurrent, (handle))                                                               \
	X(cuCtxGetCurrent, (handle *))                                                             \
	X(cuCtxSynchronize, (void))                                                                \
	X(cuModuleLoadData, (handle *, const void *))                                              \
	X(cuModuleUnload, (handle))                                                                \
	X(cuModuleGetFunction, (handle *, handle, const char *))                                   \
	X(cuMemAlloc_v2, (uint64_t *, size_t))                                                     \
	X(cuMemFree_v2, (uint64_t))                                                                \
	X(cuMemHostAlloc, (void **, size_t, unsigned))                                             \
	X(cuMemFreeHost, (void *))                                                                 \
	X(cuMemcpyHtoD_v2, (uint64_t, const void *, size_t))                                       \
	X(cuMemcpyDtoH_v2, (void *, uint64_t, size_t))                                             \
	X(cuStreamCreate, (handle *, unsigned))                                                    \
	X(cuStreamSynchronize, (handle))                                                           \
	X(cuStreamWaitEvent, (handle, handle, unsigned))                                           \
	X(cuEventCreate, (handle *, unsigned))                                                     \
	X(cuEventRecord, (handle, handle))                                                         \
	X(cuLaunchKernel, (handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **, void **)) \
	X(cuStreamBeginCapture_v2, (handle, unsigned))                                             \
	X(cuStreamEndCapture, (handle, handle *))                                                  \
	X(cuGraphInstantiateWithFlags, (handle *, handle, unsigned long long))                     \
	X(cuGraphLaunch, (handle, handle))

#define DECLARE(name, arguments) static int(*name) arguments;
FUNCTIONS(DECLARE)

#define CHECK(call)                                                                                \
	do {                                                                                       \
		int status_ = (call);                                                              \
		if (status_) {                                                                     \
			fprintf(stderr, "%s: %d\n", #call, status_);                               \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

enum { SMALL = 1024, BURST = 50 };

static handle empty, descend, stream, event;
static uint64_t small;
static float numbers[SMALL / sizeof(float)];

static const char text[] =
	".version 8.0\n.target sm_80\n.address_size 64\n"
	".visible .entry empty() {\nret;\n}\n"
	".visible .entry descend(.param .u64 at, .param .f32 rate) {\n"
	".reg .u64 %rd<4>;\n.reg .u32 %r<2>;\n.reg .f32 %f<4>;\n"
	"ld.param.u64 %rd1, [at];\nld.param.f32 %f1, [rate];\nmov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 4;\nadd.u64 %rd3, %rd1, %rd2;\n"
	"ld.global.f32 %f2, [%rd3];\nmul.f32 %f3, %f2, %f1;\nsub.f32 %f3, %f2, %f3;\nst.global.f32 [%rd3], %f3;\nret;\n}\n";

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

static void set_up(void)
{
	handle library = dlopen("libcuda.so.1", RTLD_NOW), context, module;
	int device;

	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
#define FIND(name, arguments)                                                                      \
	*(void **)&name = dlsym(library, #name);                                                   \
	if (!name) {                                                                               \
		fprintf(stderr, "libcuda.so.1 has no " #name "\n");                                \
		exit(1);                                                                           \
	}
	FUNCTIONS(FIND)
	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&device, 0));
	CHECK(cuDevicePrimaryCtxRetain(&context, device));
	CHECK(cuCtxSetCurrent(context));
	CHECK(cuModuleLoadData(&module, text));
	CHECK(cuModuleGetFunction(&empty, module, "empty"));
	CHECK(cuModuleGetFunction(&descend, module, "descend"));
	CHECK(cuMemAlloc_v2(&small, SMALL));
	CHECK(cuStreamCreate(&stream, 1));
	CHECK(cuEventCreate(&event, 2));
}

static void launch(void)
{
	CHECK(cuLaunchKernel(empty, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
}

static double waits(long n)
{
	double *times = calloc(n, sizeof *times), result;
	for (long i = 0; i < n; i++) {
		double begun = now(CLOCK_MONOTONIC);
		CHECK(cuStreamSynchronize(stream));
		times[i] = now(CLOCK_MONOTONIC) - begun;
	}
	result = median(times, n);
	free(times);
	return result;
}

static double launches(long n)
{
	double *times = calloc(n, sizeof *times), result;
	launch();
	CHECK(cuStreamSynchronize(stream));
	for (long i = 0; i < n; i++) {
		double begun = now(CLOCK_MONOTONIC);
		for (int k = 0; k < BURST; k++)
			launch();
		times[i] = (now(CLOCK_MONOTONIC) - begun) / BURST;
		CHECK(cuStreamSynchronize(stream));
	}
	result = median(times, n);
	free(times);
	return result;
}

static double launched(long n)
{
	launch();
	CHECK(cuStreamSynchronize(stream));
	double begun = now(CLOCK_MONOTONIC);
	for (long i = 0; i < n; i++)
		launch();
	CHECK(cuStreamSynchronize(stream));
	return (now(CLOCK_MONOTONIC) - begun) / n;
}

static double graphs(long n)
{
	static handle made, graph;
	if (!made) {
		CHECK(cuStreamBeginCapture_v2(stream, 0));
		for (int k = 0; k < 10; k++)
			launch();
		CHECK(cuStreamEndCapture(stream, &graph));
		CHECK(cuGraphInstantiateWithFlags(&made, graph, 0));
	}
	CHECK(cuGraphLaunch(made, stream));
	CHECK(cuStreamSynchronize(stream));
	double begun = now(CLOCK_MONOTONIC);
	for (long i = 0; i < n; i++)
		CHECK(cuGraphLaunch(made, stream));
	CHECK(cuStreamSynchronize(stream));
	return (now(CLOCK_MONOTONIC) - begun) / n;
}

static double transfers(int reads, size_t size, int pinned, long n)
{
	double *times = calloc(n + 1, sizeof *times), result;
	uint64_t at;
	void *host;

	CHECK(cuMemAlloc_v2(&at, size));
	if (pinned)
		CHECK(cuMemHostAlloc(&host, size, 0));
	else
		host = malloc(size);
	memset(host, 7, size);
	/* The first turn touches memory anew, and doesn't count. */
	for (long i = 0; i <= n; i++) {
		double begun = now(CLOCK_MONOTONIC);
		if (reads)
			CHECK(cuMemcpyDtoH_v2(host, at, size));
		else
			CHECK(cuMemcpyHtoD_v2(at, host, size));
		CHECK(cuCtxSynchronize());
		times[i] = now(CLOCK_MONOTONIC) - begun;
	}
	result = size * 1e3 / median(times + 1, n);
	CHECK(cuMemFree_v2(at));
	if (pinned)
		CHECK(cuMemFreeHost(host));
	else
		free(host);
	free(times);
	return result;
}

static double copies(size_t size, long n)
{
	double *times = calloc(n + 1, sizeof *times), result;
	char *from = malloc(size), *to = malloc(size);
	memset(from, 7, size);
	for (long i = 0; i <= n; i++) {
		double begun = now(CLOCK_MONOTONIC);
		memcpy(to, from, size);
		times[i] = now(CLOCK_MONOTONIC) - begun;
		__asm__ volatile("" : : "r"(to) : "memory");
	}
	result = size * 1e3 / median(times + 1, n);
	free(from);
	free(to);
	free(times);
	return result;
}

/* 100 calls: 26 copies (half of them reads), 13 launches, 49 that set state, 12 that ask. */
static void hundred(void)
{
	handle context;
	for (int i = 0; i < 13; i++) {
		float rate = 0.01f * i;
		void *arguments[] = {&small, &rate};
		CHECK(cuMemcpyHtoD_v2(small, numbers, sizeof numbers));
		for (int k = 0; k < (i < 12 ? 2 : 1); k++) {
			CHECK(cuEventRecord(event, NULL));
			CHECK(cuStreamWaitEvent(NULL, event, 0));
		}
		CHECK(cuLaunchKernel(descend, 1, 1, 1, SMALL / sizeof(float), 1, 1, 0, NULL, arguments, NULL));
		if (i < 12)
			CHECK(cuCtxGetCurrent(&context));
		CHECK(cuMemcpyDtoH_v2(numbers, small, sizeof numbers));
	}
}

static double mix(long calls)
{
	long done = 0;
	double begun = now(CLOCK_MONOTONIC);
	for (; done < calls; done += 101)
		hundred();
	CHECK(cuCtxSynchronize());
	return (now(CLOCK_MONOTONIC) - begun) / done;
}

/* A module of kernels whose text no other has that has another number. */
static double load(long kernels, long name)
{
	static const char head[] = ".version 8.0\n.target sm_80\n.address_size 64\n";
	size_t room = sizeof head + kernels * 600, length = 0;
	char *image = malloc(room);
	handle module, function;
	double begun, result;

	length += sprintf(image, "%s", head);
	for (long k = 0; k < kernels; k++)
		length += sprintf(image + length,
				  ".visible .entry k%ld(.param .u64 at) {\n.reg .u64 %%rd<3>;\n.reg .u32 %%r<9>;\nld.param.u64 %%rd1, [at];\n"
				  "ld.global.u32 %%r1, [%%rd1];\nmul.lo.u32 %%r2, %%r1, %ld;\nadd.u32 %%r3, %%r2, %ld;\nxor.b32 %%r4, %%r3, %%r1;\n"
				  "shl.b32 %%r5, %%r4, 3;\nsub.u32 %%r6, %%r5, %%r2;\nand.b32 %%r7, %%r6, %%r3;\nst.global.u32 [%%rd1], %%r7;\nret;\n}\n",
				  k, name, k);
	begun = now(CLOCK_MONOTONIC);
	CHECK(cuModuleLoadData(&module, image));
	CHECK(cuModuleGetFunction(&function, module, "k0"));
	result = (now(CLOCK_MONOTONIC) - begun) / 1e6;
	CHECK(cuModuleUnload(module));
	free(image);
	return result;
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
		if (!strcmp(what, "wait"))
			result = waits(a);
		else if (!strcmp(what, "launch"))
			result = launches(a);
		else if (!strcmp(what, "launched"))
			result = launched(a);
		else if (!strcmp(what, "graph"))
			result = graphs(a);
		else if (!strcmp(what, "write") || !strcmp(what, "read"))
			result = transfers(what[0] == 'r', a, b, c);
		else if (!strcmp(what, "memcpy"))
			result = copies(a, b);
		else if (!strcmp(what, "mix"))
			result = mix(a);
		else if (!strcmp(what, "load"))
			result = load(a, b);
		else
			return 2;
		printf("%.3f %.6f\n", result, (now(CLOCK_PROCESS_CPUTIME_ID) - begun) / 1e9);
		fflush(stdout);
	}
	return 0;
}
