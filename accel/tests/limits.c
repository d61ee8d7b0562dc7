// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Calls every function with arguments at their limits, one at a time, and prints what each answers: `NUMBER TEXT: ANSWER`. The calls are
 * generated (accel/server/tests/limits.rs) into the file CASES. A driver may die of a call: who runs this goes on at the next number, which is
 * the argument. Ends with code 3 where a call ended the connection.
 */
#define CL_TARGET_OPENCL_VERSION 300
/* For clSetCommandQueueProperty. */
#define CL_USE_DEPRECATED_OPENCL_1_0_APIS
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#include <CL/cl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GONE 3

static cl_platform_id platform;
static cl_device_id device;
static cl_context context, context2;
static cl_command_queue queue, queue2;
static cl_mem buffer, dst_buffer, buffer2, image, dst_image;
static cl_sampler sampler;
static cl_program program, compiled;
static cl_kernel kernel;
static cl_event event, event2, out_event;
static void *svm, *mapped;
static cl_int code;
static int number, start;

/* Of a command that fails: what it waits for. */
static cl_event waiting;
static int called, called_with;
static pthread_mutex_t callback_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t callback_came = PTHREAD_COND_INITIALIZER;

static const char *source = "kernel void f(global int *to) { to[0] = 1; }";
static cl_image_format format = {CL_RGBA, CL_UNSIGNED_INT8};
static cl_image_desc desc = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = 8, .image_height = 8};
static cl_buffer_region part = {0, 64};
static char host[1 << 16] __attribute__((aligned(4096)));
static const char zeros[1 << 21] __attribute__((unused));
static size_t zero3[3], one3[3] = {1, 1, 1}, eight = 8, out_size;
static cl_uint out_uint;
static cl_ulong out_ulong;

/* What the driver has not written: each out-parameter's value before its call. */
#define UNWRITTEN 0x5a5a5a5a
static char before_call[256];

static void unwritten(void)
{
	out_uint = UNWRITTEN, out_ulong = out_size = UNWRITTEN, out_event = NULL;
	memcpy(before_call, host, sizeof before_call);
}

/* What a call wrote that failed. */
static void written(void)
{
	if (out_uint != UNWRITTEN)
		printf(", wrote %d", (int)out_uint);
	if (out_ulong != UNWRITTEN || out_size != UNWRITTEN)
		printf(", wrote %lx %lx", (long)out_ulong, (long)out_size);
	if (out_event)
		printf(", wrote an event");
	if (memcmp(before_call, host, sizeof before_call))
		printf(", wrote %d", *(int *)host);
}

static int begins(const char *text)
{
	if (number++ < start)
		return 0;
	printf("%d %s: ", number - 1, text);
	fflush(stdout);
	/* A call that never returns is one that the driver dies of. */
	alarm(60);
	code = 0;
	unwritten();
	return 1;
}

static void ends(void)
{
	int finished = clFinish(queue);

	printf(", finish %d\n", finished);
	fflush(stdout);
	if (finished == CL_OUT_OF_RESOURCES)
		_exit(GONE);
}

#define CASE(text, call) \
	do { \
		if (begins(text)) { \
			int status = (int)(call); \
			printf("%d", status); \
			if (status) \
				written(); \
			ends(); \
		} \
	} while (0)
/* A command that waits for an event which fails, in a queue that keeps its order or doesn't, and what waits for that command in turn. */
#define FAILS(text, properties, call) \
	do { \
		if (begins(text)) { \
			cl_command_queue before = queue; \
			queue = clCreateCommandQueue(context, device, properties, NULL); \
			waiting = user_event(); \
			out_event = NULL; \
			int made = (int)(long)(call); \
			printf("%d %d", code, code ? 0 : made); \
			fails(properties); \
			queue = before; \
			ends(); \
		} \
	} while (0)
#define MADE(text, call) \
	do { \
		if (begins(text)) { \
			int made = !!(call); \
			/* The handle of a call that failed is up to the driver. */ \
			printf("%d %d", code, code ? 0 : made); \
			if (code) \
				written(); \
			ends(); \
		} \
	} while (0)
#define ASKED(text, call) \
	do { \
		if (begins(text)) { \
			for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) \
				for (cl_uint param = ranges[i][0]; param <= ranges[i][1]; param++) { \
					size_t size = 4096, ret = UNWRITTEN; \
					void *value = memset(host, 0, 4096); \
					int status = (call); \
					int wrote = status && (ret != UNWRITTEN || memcmp(host, zeros, 4096)); \
					if (status != CL_INVALID_VALUE || wrote) \
						printf("%x=%d(%zu) ", param, status, status && !wrote || ret == UNWRITTEN ? 0 : ret); \
				} \
			ends(); \
		} \
	} while (0)

/*
 * The numbers of properties of all kinds, without CL_QUEUE_SIZE, of no use here, those that tell of memory at the moment, and extensions, of which only those
 * are offered that are served (offers.c).
 */
static const cl_uint ranges[][2] = {
	{0, 3}, {0x900, 0x903}, {0x905, 0x906}, {0x908, 0x908}, {0x1000, 0x102f}, {0x1031, 0x105f}, {0x1061, 0x1076}, {0x1080, 0x1098},
	{0x1100, 0x1125}, {0x1150, 0x116b}, {0x1180, 0x1186},
	{0x1190, 0x119a}, {0x11b0, 0x11ba}, {0x11d0, 0x11d5}, {0x1280, 0x1285}, {0x2033, 0x2034}, {0xfffffffe, 0xfffffffe},
};

static cl_event user_event(void)
{
	return clCreateUserEvent(context, NULL);
}

static cl_kernel fresh_kernel(void)
{
	cl_kernel k = clCreateKernel(program, "f", NULL);
	clSetKernelArg(k, 0, sizeof buffer, &buffer);
	return k;
}

static cl_program fresh_program(void)
{
	return clCreateProgramWithSource(context, 1, &source, NULL, NULL);
}

static void *map(void)
{
	return clEnqueueMapBuffer(queue, buffer, CL_TRUE, CL_MAP_READ, 0, 64, 0, NULL, NULL, NULL);
}

static void ended(const char *what, cl_event e)
{
	cl_int status = 99, waited = clWaitForEvents(1, &e);

	clGetEventInfo(e, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof status, &status, NULL);
	printf(", %s %d %d", what, waited, status);
}

static void CL_CALLBACK on_end(cl_event e, cl_int status, void *user)
{
	pthread_mutex_lock(&callback_lock);
	called = 1, called_with = status;
	pthread_cond_signal(&callback_came);
	pthread_mutex_unlock(&callback_lock);
}

/* A callback that is registered when its command has ended. */
static void called_back(cl_event e)
{
	called = 0;
	printf(", registered %d", clSetEventCallback(e, CL_COMPLETE, on_end, NULL));
	pthread_mutex_lock(&callback_lock);
	while (!called)
		pthread_cond_wait(&callback_came, &callback_lock);
	pthread_mutex_unlock(&callback_lock);
	printf(", called %d", called_with);
	ended("then", e);
}

/* All commands have an event: PoCL 3.1 dies of a command that fails without one. */
static void fails(cl_command_queue_properties properties)
{
	cl_command_queue other = clCreateCommandQueue(context, device, properties, NULL);
	cl_event command = out_event, marker = NULL, chained = NULL, read = NULL, barrier = NULL;
	cl_event list[] = {command, event};
	int zero = 0, five = 5, data = -1, after = -1;

	if (!command)
		return;
	clEnqueueMarkerWithWaitList(queue, 2, list, &marker);
	clEnqueueFillBuffer(other, dst_buffer, &zero, 4, 0, 4, 1, &command, &chained);
	clEnqueueReadBuffer(other, dst_buffer, CL_FALSE, 0, 4, &data, 1, &chained, &read);
	clEnqueueBarrierWithWaitList(queue, 0, NULL, &barrier);
	clSetUserEventStatus(waiting, -7);
	ended("its event", command);
	ended("what it waited for", waiting);
	ended("marker", marker);
	ended("on another queue", chained);
	ended("read", read);
	ended("barrier", barrier);
	printf(", waits %d %d", clWaitForEvents(2, (cl_event[]){read, event}), clWaitForEvents(2, (cl_event[]){event, command}));
	printf(", queues %d %d, data %d", clFinish(queue), clFinish(other), data);
	called_back(command);
	called_back(waiting);
	printf(", afterwards %d", clEnqueueFillBuffer(queue, dst_buffer, &five, 4, 64, 4, 0, NULL, NULL));
	printf(" %d", clEnqueueReadBuffer(queue, dst_buffer, CL_TRUE, 64, 4, &after, 0, NULL, NULL));
	printf(" %d", after);
}

int main(int argc, char **argv)
{
	start = argc > 1 ? atoi(argv[1]) : 0;
	clGetPlatformIDs(1, &platform, NULL);
	clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL);
	context = clCreateContext(NULL, 1, &device, NULL, NULL, NULL);
	context2 = clCreateContext(NULL, 1, &device, NULL, NULL, NULL);
	queue = clCreateCommandQueueWithProperties(context, device, NULL, NULL);
	queue2 = clCreateCommandQueueWithProperties(context2, device, NULL, NULL);
	buffer = clCreateBuffer(context, 0, 4096, NULL, NULL);
	dst_buffer = clCreateBuffer(context, 0, 4096, NULL, NULL);
	buffer2 = clCreateBuffer(context2, 0, 4096, NULL, NULL);
	image = clCreateImage(context, 0, &format, &desc, NULL, NULL);
	dst_image = clCreateImage(context, 0, &format, &desc, NULL, NULL);
	sampler = clCreateSampler(context, CL_FALSE, CL_ADDRESS_NONE, CL_FILTER_NEAREST, NULL);
	program = fresh_program();
	clBuildProgram(program, 0, NULL, "", NULL, NULL);
	compiled = fresh_program();
	clCompileProgram(compiled, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL);
	kernel = fresh_kernel();
	clEnqueueMarkerWithWaitList(queue, 0, NULL, &event);
	clEnqueueMarkerWithWaitList(queue2, 0, NULL, &event2);
	clFinish(queue);
	clFinish(queue2);
	svm = clSVMAlloc(context, CL_MEM_READ_WRITE, 4096, 0);
#include CASES
	printf("end\n");
	return 0;
}
