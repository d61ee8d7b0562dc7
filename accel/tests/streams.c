// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Long transfers that the program waits for, at sizes around their pieces, from several threads, behind commands that take long, fail or print. Prints
 * the same natively and forwarded. `streams forever` writes and reads until it is killed. `streams failing` transfers behind kernels that fail, of which
 * PoCL 3.1 dies natively.
 */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 9 << 20, SPARE = 8192 };

static cl_context context;
static cl_device_id device;
static cl_program program;

static void check(const char *what, cl_int code)
{
	if (code) {
		printf("%s: %d\n", what, code);
		exit(1);
	}
}

static cl_command_queue queue_with(cl_queue_properties bits)
{
	cl_queue_properties properties[] = {CL_QUEUE_PROPERTIES, bits, 0};
	cl_int code;
	cl_command_queue queue = clCreateCommandQueueWithProperties(context, device, properties, &code);
	check("queue", code);
	return queue;
}

static cl_mem buffer_of(size_t size)
{
	cl_int code;
	cl_mem buffer = clCreateBuffer(context, CL_MEM_READ_WRITE, size, NULL, &code);
	check("buffer", code);
	return buffer;
}

static unsigned char pattern(size_t i, unsigned seed)
{
	return (i * 2654435761u + seed * 40503u) >> 13;
}

/* Returns the first offset at which two ranges differ; -1: none. */
static long differs(const unsigned char *a, const unsigned char *b, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (a[i] != b[i])
			return (long)i;
	return -1;
}

/* Writes and reads ranges of all lengths; the first that came back otherwise. */
static long there_and_back(cl_command_queue queue, unsigned seed, int with_events)
{
	static const size_t sizes[] = {512 << 10, (1 << 20) + 13, (2 << 20) - 1, 2 << 20, (2 << 20) + 1, (3 << 20) + 17, MOST - 5};
	static const size_t offsets[] = {0, 1, 4097};
	unsigned char *from = malloc(MOST + SPARE), *to = malloc(MOST + SPARE);
	cl_mem buffer = buffer_of(MOST + SPARE);
	long wrong = -1;

	for (size_t s = 0; s < sizeof sizes / sizeof *sizes && wrong < 0; s++)
		for (size_t o = 0; o < 3 && wrong < 0; o++) {
			size_t size = sizes[s], offset = offsets[o];
			cl_event event = NULL, *wanted = with_events ? &event : NULL;
			for (size_t i = 0; i < size; i++)
				from[i + o] = pattern(i, seed + s);
			memset(to, 0xee, MOST + SPARE);
			check("write", clEnqueueWriteBuffer(queue, buffer, CL_TRUE, offset, size, from + o, 0, NULL, wanted));
			/* It has taken the bytes. */
			memset(from, 0xdd, MOST);
			if (wanted)
				check("event", clReleaseEvent(event));
			check("read", clEnqueueReadBuffer(queue, buffer, CL_TRUE, offset, size, to + 3 - o, 0, NULL, wanted));
			if (wanted)
				check("event", clReleaseEvent(event));
			for (size_t i = 0; i < size; i++)
				from[i + o] = pattern(i, seed + s);
			wrong = differs(from + o, to + 3 - o, size);
			if (to[3 - o + size] != 0xee || to[2 - o] != 0xee)
				wrong = (long)size;
			/* The same by short reads. */
			for (size_t at = 0; at < size && wrong < 0; at += 100000) {
				size_t n = size - at < 100000 ? size - at : 100000;
				check("short read", clEnqueueReadBuffer(queue, buffer, CL_TRUE, offset + at, n, to, 0, NULL, NULL));
				wrong = differs(from + o + at, to, n);
			}
		}
	check("release", clReleaseMemObject(buffer));
	free(from);
	free(to);
	return wrong;
}

static void *in_a_thread(void *seed)
{
	cl_command_queue queue = queue_with(0);
	long wrong = there_and_back(queue, (unsigned)(size_t)seed, 0);
	clReleaseCommandQueue(queue);
	return (void *)wrong;
}

static void *sets_later(void *event)
{
	usleep(50000);
	check("status", clSetUserEventStatus(event, CL_COMPLETE));
	return NULL;
}

static cl_kernel kernel_of(const char *name, cl_mem buffer)
{
	cl_int code;
	cl_kernel kernel = clCreateKernel(program, name, &code);
	check(name, code);
	check("argument", clSetKernelArg(kernel, 0, sizeof buffer, &buffer));
	return kernel;
}

/* Behind a kernel that waits for another thread: what it makes is read, and what it printed stands before. */
static void behind_a_kernel(void)
{
	cl_command_queue queue = queue_with(0);
	cl_mem buffer = buffer_of(MOST);
	cl_kernel grow = kernel_of("grow", buffer);
	unsigned char *bytes = calloc(1, MOST);
	size_t items = MOST;
	cl_int code;
	pthread_t thread;

	check("write", clEnqueueWriteBuffer(queue, buffer, CL_TRUE, 0, MOST, bytes, 0, NULL, NULL));
	for (int i = 1; i <= 3; i++) {
		cl_event gate = clCreateUserEvent(context, &code);
		check("user event", code);
		check("launch", clEnqueueNDRangeKernel(queue, grow, 1, NULL, &items, NULL, 1, &gate, NULL));
		pthread_create(&thread, NULL, sets_later, gate);
		check("read", clEnqueueReadBuffer(queue, buffer, CL_TRUE, 0, MOST, bytes, 0, NULL, NULL));
		printf("grown to %d %d %d\n", bytes[0], bytes[MOST / 2], bytes[MOST - 1]);
		fflush(stdout);
		pthread_join(thread, NULL);
		clReleaseEvent(gate);
	}
	clReleaseKernel(grow);
	clReleaseMemObject(buffer);
	clReleaseCommandQueue(queue);
	free(bytes);
}

static void *fails_later(void *event)
{
	usleep(50000);
	check("status", clSetUserEventStatus(event, -5));
	return NULL;
}

/* Behind a kernel that fails: a thread that waits comes back. */
static void behind_a_failure(void)
{
	cl_command_queue queue = queue_with(0);
	cl_mem buffer = buffer_of(MOST);
	cl_kernel grow = kernel_of("grow", buffer);
	unsigned char *bytes = calloc(1, MOST);
	size_t items = MOST;
	cl_int code;
	pthread_t thread;

	for (int writes = 0; writes < 2; writes++) {
		cl_event gate = clCreateUserEvent(context, &code);
		check("user event", code);
		check("launch", clEnqueueNDRangeKernel(queue, grow, 1, NULL, &items, NULL, 1, &gate, NULL));
		pthread_create(&thread, NULL, fails_later, gate);
		if (writes)
			code = clEnqueueWriteBuffer(queue, buffer, CL_TRUE, 0, MOST, bytes, 0, NULL, NULL);
		else
			code = clEnqueueReadBuffer(queue, buffer, CL_TRUE, 0, MOST, bytes, 0, NULL, NULL);
		printf("%s behind a failure %d\n", writes ? "write" : "read", code);
		pthread_join(thread, NULL);
		check("finish", clFinish(queue));
		/* The queue goes on. */
		bytes[7] = 42;
		printf("write %d", clEnqueueWriteBuffer(queue, buffer, CL_TRUE, 0, MOST, bytes, 0, NULL, NULL));
		bytes[7] = 0;
		printf(" read %d", clEnqueueReadBuffer(queue, buffer, CL_TRUE, 0, MOST, bytes, 0, NULL, NULL));
		printf(" %d\n", bytes[7]);
		clReleaseEvent(gate);
	}
	clReleaseKernel(grow);
	clReleaseMemObject(buffer);
	clReleaseCommandQueue(queue);
	free(bytes);
}

/* Bytes that were written without waiting for the device are read at once by another queue, or by one without order: all sizes, again and again. */
static void read_by_others(cl_command_queue writer, cl_command_queue reader, const char *who)
{
	static const size_t sizes[] = {16, 4000, 30000, 400000, 3 << 20};
	unsigned char *from = malloc(3 << 20), *to = malloc(3 << 20);
	cl_mem buffer = buffer_of(3 << 20);
	size_t zero[3] = {0, 0, 0};
	long wrong = 0;

	for (unsigned round = 1; round < 60; round++)
		for (size_t s = 0; s < 5; s++) {
			size_t size = sizes[s], region[3] = {size, 1, 1};
			memset(from, round, size);
			memset(to, 0, size);
			if (round % 2)
				check("write", clEnqueueWriteBuffer(writer, buffer, CL_TRUE, 0, size, from, 0, NULL, NULL));
			else
				check("write", clEnqueueWriteBufferRect(writer, buffer, CL_TRUE, zero, zero, region, 0, 0, 0, 0, from, 0, NULL, NULL));
			check("read", clEnqueueReadBuffer(reader, buffer, CL_TRUE, 0, size, to, 0, NULL, NULL));
			wrong += differs(from, to, size) >= 0;
		}
	printf("%s: %ld wrong\n", who, wrong);
	clReleaseMemObject(buffer);
	free(from);
	free(to);
}

/* The event of a write that blocks has ended, and tells its times. */
static void ended_at_once(void)
{
	cl_command_queue queue = queue_with(CL_QUEUE_PROFILING_ENABLE);
	cl_mem buffer = buffer_of(MOST);
	unsigned char *bytes = calloc(1, MOST);
	cl_event event;
	cl_ulong begun, ended;
	cl_int status;

	for (size_t size = 1000; size < MOST; size *= 8) {
		check("write", clEnqueueWriteBuffer(queue, buffer, CL_TRUE, 0, size, bytes, 0, NULL, &event));
		check("status", clGetEventInfo(event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof status, &status, NULL));
		int code = clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_START, sizeof begun, &begun, NULL);
		code |= clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_END, sizeof ended, &ended, NULL);
		printf("ended %d, times %d %d\n", status, code, !code && begun <= ended);
		clReleaseEvent(event);
	}
	clReleaseMemObject(buffer);
	clReleaseCommandQueue(queue);
	free(bytes);
}

/* Of a part of a buffer, and of one that may not be read. */
static void of_other_buffers(void)
{
	cl_command_queue queue = queue_with(0);
	cl_int code;
	unsigned char *bytes = malloc(MOST), *back = malloc(MOST);
	cl_mem whole = buffer_of(MOST);
	cl_buffer_region region = {1 << 20, 4 << 20};
	cl_mem part = clCreateSubBuffer(whole, 0, CL_BUFFER_CREATE_TYPE_REGION, &region, &code);

	check("sub-buffer", code);
	for (size_t i = 0; i < MOST; i++)
		bytes[i] = pattern(i, 5);
	printf("part %d", clEnqueueWriteBuffer(queue, part, CL_TRUE, 0, 4 << 20, bytes, 0, NULL, NULL));
	printf(" %d", clEnqueueReadBuffer(queue, whole, CL_TRUE, 1 << 20, 4 << 20, back, 0, NULL, NULL));
	printf(" %ld", differs(bytes, back, 4 << 20));
	printf(" %d\n", clEnqueueReadBuffer(queue, part, CL_TRUE, 1, 4 << 20, back, 0, NULL, NULL));
	cl_mem secret = clCreateBuffer(context, CL_MEM_HOST_WRITE_ONLY, MOST, NULL, &code);
	check("buffer", code);
	printf("secret %d %d\n", clEnqueueWriteBuffer(queue, secret, CL_TRUE, 0, MOST, bytes, 0, NULL, NULL),
	       clEnqueueReadBuffer(queue, secret, CL_TRUE, 0, MOST, back, 0, NULL, NULL));
	printf("beyond %d %d\n", clEnqueueWriteBuffer(queue, whole, CL_TRUE, 1, MOST, bytes, 0, NULL, NULL),
	       clEnqueueReadBuffer(queue, whole, CL_TRUE, MOST, MOST, back, 0, NULL, NULL));
	clReleaseMemObject(part);
	clReleaseMemObject(whole);
	clReleaseMemObject(secret);
	clReleaseCommandQueue(queue);
	free(bytes);
	free(back);
}

int main(int argc, char **argv)
{
	const char *source = "kernel void grow(global uchar *b) { if (get_global_id(0) == 0) printf(\"growing\\n\"); b[get_global_id(0)]++; }";
	cl_platform_id platform;
	pthread_t threads[3];
	cl_int code;

	setvbuf(stdout, NULL, _IOLBF, 0);
	check("platform", clGetPlatformIDs(1, &platform, NULL));
	check("device", clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL));
	context = clCreateContext(NULL, 1, &device, NULL, NULL, &code);
	check("context", code);
	if (argc > 1 && !strcmp(argv[1], "forever")) {
		cl_command_queue queue = queue_with(0);
		puts("begun");
		fflush(stdout);
		for (unsigned seed = 0;; seed++)
			if (there_and_back(queue, seed, 0) >= 0)
				return 1;
	}
	program = clCreateProgramWithSource(context, 1, &source, NULL, &code);
	check("program", code);
	check("build", clBuildProgram(program, 0, NULL, "", NULL, NULL));
	if (argc > 1) {
		behind_a_failure();
		return 0;
	}
	printf("in order %ld\n", there_and_back(queue_with(0), 1, 0));
	printf("with events %ld\n", there_and_back(queue_with(CL_QUEUE_PROFILING_ENABLE), 2, 1));
	printf("out of order %ld\n", there_and_back(queue_with(CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE), 3, 0));
	for (size_t i = 0; i < 3; i++)
		pthread_create(&threads[i], NULL, in_a_thread, (void *)(i + 10));
	for (size_t i = 0; i < 3; i++) {
		void *wrong;
		pthread_join(threads[i], &wrong);
		printf("thread %zu %ld\n", i, (long)wrong);
	}
	behind_a_kernel();
	cl_command_queue a = queue_with(0), b = queue_with(0), c = queue_with(CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE);
	read_by_others(a, b, "another queue");
	read_by_others(c, c, "out of order");
	ended_at_once();
	of_other_buffers();
	return 0;
}
