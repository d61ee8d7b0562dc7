// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Odd, but legal: callbacks that make calls, graphs of commands on queues without order, objects that are given up while they are in use, overlapping
 * maps, the largest argument, threads that wait while others end the program. Prints the same natively and forwarded.
 */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { N = 1 << 16, LINKS = 100, NODES = 64 };

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

static cl_mem buffer_of(cl_mem_flags flags, size_t size, void *data)
{
	cl_int code;
	cl_mem buffer = clCreateBuffer(context, flags, size, data, &code);
	check("buffer", code);
	return buffer;
}

static cl_kernel kernel_of(const char *name)
{
	cl_int code;
	cl_kernel kernel = clCreateKernel(program, name, &code);
	check(name, code);
	return kernel;
}

static int value_at(cl_command_queue queue, cl_mem buffer, size_t i)
{
	int value = -1;
	check("read", clEnqueueReadBuffer(queue, buffer, CL_TRUE, i * sizeof value, sizeof value, &value, 0, NULL, NULL));
	return value;
}

/* A callback enqueues the next command, whose end calls it again: also from within clSetEventCallback, if the command has ended by then. */
static struct {
	cl_command_queue queue;
	cl_kernel add;
	int links, returned, failed;
	pthread_mutex_t lock;
	pthread_cond_t done;
} chain = {.lock = PTHREAD_MUTEX_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static void CL_CALLBACK next_link(cl_event event, cl_int status, void *user)
{
	size_t items = N;
	cl_event mine;
	int is_last, failed = status != CL_COMPLETE;

	(void)user;
	pthread_mutex_lock(&chain.lock);
	is_last = ++chain.links >= LINKS;
	pthread_mutex_unlock(&chain.lock);
	if (!is_last) {
		failed |= clEnqueueNDRangeKernel(chain.queue, chain.add, 1, NULL, &items, NULL, 0, NULL, &mine);
		failed |= clFlush(chain.queue);
		failed |= clSetEventCallback(mine, CL_COMPLETE, next_link, NULL);
	}
	clReleaseEvent(event);
	pthread_mutex_lock(&chain.lock);
	chain.failed |= failed;
	chain.returned++;
	pthread_cond_signal(&chain.done);
	pthread_mutex_unlock(&chain.lock);
}

static void callbacks_in_a_chain(void)
{
	size_t items = N;
	int zero = 0, one = 1;
	cl_event first;
	cl_mem buffer = buffer_of(0, N * sizeof(int), NULL);

	chain.queue = queue_with(0);
	chain.add = kernel_of("add");
	check("fill", clEnqueueFillBuffer(chain.queue, buffer, &zero, sizeof zero, 0, N * sizeof(int), 0, NULL, NULL));
	check("argument", clSetKernelArg(chain.add, 0, sizeof buffer, &buffer));
	check("argument", clSetKernelArg(chain.add, 1, sizeof one, &one));
	check("launch", clEnqueueNDRangeKernel(chain.queue, chain.add, 1, NULL, &items, NULL, 0, NULL, &first));
	check("flush", clFlush(chain.queue));
	check("callback", clSetEventCallback(first, CL_COMPLETE, next_link, NULL));
	pthread_mutex_lock(&chain.lock);
	while (chain.returned < LINKS)
		pthread_cond_wait(&chain.done, &chain.lock);
	pthread_mutex_unlock(&chain.lock);
	printf("chain: %d links, failed %d, value %d\n", chain.links, chain.failed, value_at(chain.queue, buffer, N - 1));
	clReleaseMemObject(buffer);
	clReleaseKernel(chain.add);
	clReleaseCommandQueue(chain.queue);
}

/* Commands on a queue without order, each behind some earlier ones: node i adds what those made. */
static void a_graph(void)
{
	cl_command_queue queue = queue_with(CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE);
	cl_mem buffer = buffer_of(0, NODES * sizeof(int), NULL);
	cl_kernel sum = kernel_of("sum");
	cl_event events[NODES];
	unsigned seed = 12345;
	int wanted[NODES], made[NODES], zero = 0;
	size_t one = 1;

	check("fill", clEnqueueFillBuffer(queue, buffer, &zero, sizeof zero, 0, NODES * sizeof(int), 0, NULL, NULL));
	check("finish", clFinish(queue));
	check("argument", clSetKernelArg(sum, 0, sizeof buffer, &buffer));
	for (int i = 0; i < NODES; i++) {
		cl_event before[2];
		int from[2] = {0, 0}, n = i < 2 ? 0 : 2;
		for (int k = 0; k < n; k++) {
			seed = seed * 1103515245 + 12345;
			from[k] = (seed >> 16) % i;
			before[k] = events[from[k]];
		}
		wanted[i] = n ? (wanted[from[0]] + wanted[from[1]]) % 1000 + 1 : 1;
		for (int k = 0; k < 2; k++)
			check("argument", clSetKernelArg(sum, 1 + k, sizeof(int), &from[k]));
		check("argument", clSetKernelArg(sum, 3, sizeof i, &i));
		check("argument", clSetKernelArg(sum, 4, sizeof n, &n));
		check("launch", clEnqueueNDRangeKernel(queue, sum, 1, NULL, &one, NULL, n, n ? before : NULL, &events[i]));
	}
	check("read", clEnqueueReadBuffer(queue, buffer, CL_TRUE, 0, sizeof made, made, NODES, events, NULL));
	printf("graph: %s\n", memcmp(made, wanted, sizeof made) ? "wrong" : "right");
	for (int i = 0; i < NODES; i++)
		clReleaseEvent(events[i]);
	clReleaseKernel(sum);
	clReleaseMemObject(buffer);
	clReleaseCommandQueue(queue);
}

/* Everything is given up by the program while commands are under way; what those made is there. */
static void given_up_in_use(void)
{
	cl_command_queue queue = queue_with(0);
	cl_mem buffer = buffer_of(0, N * sizeof(int), NULL);
	cl_kernel add = kernel_of("add");
	cl_buffer_region region = {4096, 4096};
	size_t items = N;
	int code, zero = 0, three = 3, value = -1;
	cl_uint references;
	cl_event gate = clCreateUserEvent(context, &code), last;
	cl_mem part = clCreateSubBuffer(buffer, 0, CL_BUFFER_CREATE_TYPE_REGION, &region, &code);

	check("sub-buffer", code);
	check("fill", clEnqueueFillBuffer(queue, buffer, &zero, sizeof zero, 0, N * sizeof(int), 0, NULL, NULL));
	check("argument", clSetKernelArg(add, 0, sizeof buffer, &buffer));
	check("argument", clSetKernelArg(add, 1, sizeof three, &three));
	check("launch", clEnqueueNDRangeKernel(queue, add, 1, NULL, &items, NULL, 1, &gate, NULL));
	check("read", clEnqueueReadBuffer(queue, part, CL_FALSE, 0, sizeof value, &value, 0, NULL, &last));
	check("release", clReleaseMemObject(buffer));
	check("release", clReleaseMemObject(part));
	check("release", clReleaseKernel(add));
	check("retain", clRetainCommandQueue(queue));
	check("release", clReleaseCommandQueue(queue));
	check("references", clGetCommandQueueInfo(queue, CL_QUEUE_REFERENCE_COUNT, sizeof references, &references, NULL));
	check("set", clSetUserEventStatus(gate, CL_COMPLETE));
	check("release", clReleaseEvent(gate));
	check("wait", clWaitForEvents(1, &last));
	check("release", clReleaseEvent(last));
	check("release", clReleaseCommandQueue(queue));
	printf("given up: value %d\n", value);
}

typedef struct {
	int words[256 - 2];
} large;

/* An argument as large as all may be together, but for a pointer. */
static void a_large_argument(void)
{
	cl_command_queue queue = queue_with(0);
	cl_mem buffer = buffer_of(0, sizeof(int), NULL);
	cl_kernel kernel = kernel_of("last_word");
	large value = {{0}};
	size_t one = 1;

	value.words[253] = 77;
	check("argument", clSetKernelArg(kernel, 0, sizeof buffer, &buffer));
	check("argument", clSetKernelArg(kernel, 1, sizeof value, &value));
	check("launch", clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &one, NULL, 0, NULL, NULL));
	printf("large: %d\n", value_at(queue, buffer, 0));
	clReleaseKernel(kernel);
	clReleaseMemObject(buffer);
	clReleaseCommandQueue(queue);
}

/* Two maps for reading overlap, one for writing lies beside; in whichever order they go, what was written is there. */
static void overlapping_maps(void)
{
	cl_command_queue queue = queue_with(0);
	cl_mem plain = buffer_of(0, N, NULL), pinned = buffer_of(CL_MEM_ALLOC_HOST_PTR, N, NULL);
	cl_mem both[] = {plain, pinned};
	unsigned char seven = 7, bytes[N];
	cl_uint maps;
	int e;

	for (int i = 0; i < 2; i++) {
		check("fill", clEnqueueFillBuffer(queue, both[i], &seven, 1, 0, N, 0, NULL, NULL));
		unsigned char *a = clEnqueueMapBuffer(queue, both[i], CL_TRUE, CL_MAP_READ, 0, N / 2, 0, NULL, NULL, &e);
		check("map", e);
		unsigned char *b = clEnqueueMapBuffer(queue, both[i], CL_TRUE, CL_MAP_READ, N / 4, N / 4, 0, NULL, NULL, &e);
		check("map", e);
		unsigned char *c = clEnqueueMapBuffer(queue, both[i], CL_TRUE, CL_MAP_WRITE, N / 2, N / 2, 0, NULL, NULL, &e);
		check("map", e);
		check("count", clGetMemObjectInfo(both[i], CL_MEM_MAP_COUNT, sizeof maps, &maps, NULL));
		printf("maps: %u, %d %d", maps, a[N / 4], b[0]);
		memset(c, 9, N / 2);
		check("unmap", clEnqueueUnmapMemObject(queue, both[i], a, 0, NULL, NULL));
		check("unmap", clEnqueueUnmapMemObject(queue, both[i], c, 0, NULL, NULL));
		check("unmap", clEnqueueUnmapMemObject(queue, both[i], b, 0, NULL, NULL));
		check("read", clEnqueueReadBuffer(queue, both[i], CL_TRUE, 0, N, bytes, 0, NULL, NULL));
		printf(", then %d %d, again %d\n", bytes[N / 2 - 1], bytes[N - 1], clEnqueueUnmapMemObject(queue, both[i], a, 0, NULL, NULL));
		clReleaseMemObject(both[i]);
	}
	clReleaseCommandQueue(queue);
}

/* Queues and events of another context are none of this one's. */
static void of_another_context(void)
{
	cl_int e;
	cl_context other = clCreateContext(NULL, 1, &device, NULL, NULL, &e);
	check("context", e);
	cl_event gate = clCreateUserEvent(other, &e), mine = clCreateUserEvent(context, &e);
	cl_event both[] = {gate, mine};
	cl_command_queue queue = queue_with(0);
	cl_mem buffer = buffer_of(0, 64, NULL), foreign = clCreateBuffer(other, 0, 64, NULL, &e);
	char bytes[64] = {0};

	printf("another context: %d", clEnqueueWriteBuffer(queue, buffer, CL_FALSE, 0, 64, bytes, 1, &gate, NULL));
	printf(" %d", clEnqueueCopyBuffer(queue, buffer, foreign, 0, 0, 64, 0, NULL, NULL));
	printf(" %d", clWaitForEvents(2, both));
	printf(" %d\n", clWaitForEvents(0, NULL));
	check("set", clSetUserEventStatus(gate, CL_COMPLETE));
	check("set", clSetUserEventStatus(mine, CL_COMPLETE));
	clReleaseEvent(gate);
	clReleaseEvent(mine);
	clReleaseMemObject(buffer);
	clReleaseMemObject(foreign);
	clReleaseCommandQueue(queue);
	clReleaseContext(other);
}

static void *waits_for_ever(void *event)
{
	clWaitForEvents(1, (cl_event *)&event);
	return NULL;
}

int main(void)
{
	const char *source = "typedef struct { int words[254]; } large;\n"
			     "kernel void add(global int *to, int n) { to[get_global_id(0)] += n; }\n"
			     "kernel void sum(global int *to, int a, int b, int i, int n) { to[i] = n ? (to[a] + to[b]) % 1000 + 1 : 1; }\n"
			     "kernel void last_word(global int *to, large from) { *to = from.words[253]; }\n";
	cl_platform_id platform;
	pthread_t thread;
	cl_int code;

	setvbuf(stdout, NULL, _IOLBF, 0);
	check("platform", clGetPlatformIDs(1, &platform, NULL));
	check("device", clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL));
	context = clCreateContext(NULL, 1, &device, NULL, NULL, &code);
	check("context", code);
	program = clCreateProgramWithSource(context, 1, &source, NULL, &code);
	check("program", code);
	check("build", clBuildProgram(program, 0, NULL, "", NULL, NULL));
	callbacks_in_a_chain();
	a_graph();
	given_up_in_use();
	a_large_argument();
	overlapping_maps();
	of_another_context();
	/* The program ends while threads of it wait for events that never end. */
	for (int i = 0; i < 20; i++) {
		cl_event never = clCreateUserEvent(context, &code);
		check("user event", code);
		pthread_create(&thread, NULL, waits_for_ever, never);
	}
	puts("ends");
	exit(0);
}
