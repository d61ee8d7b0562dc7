// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Calls every function with arguments at their limits, one at a time, and prints what each answers: `NUMBER TEXT: ANSWER`. The calls are
 * generated (accel/server/tests/limits.rs) into the file CASES. A driver may die of a call: who runs this goes on at the next number, which is
 * the argument. Ends with code 3 where a call ended the connection.
 */
#define CL_TARGET_OPENCL_VERSION 300
/* For clSetCommandQueueProperty. */
#define CL_USE_DEPRECATED_OPENCL_1_0_APIS
#include <CL/cl.h>
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

static const char *source = "kernel void f(global int *to) { to[0] = 1; }";
static cl_image_format format = {CL_RGBA, CL_UNSIGNED_INT8};
static cl_image_desc desc = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = 8, .image_height = 8};
static cl_buffer_region part = {0, 64};
static char host[1 << 16] __attribute__((aligned(4096)));
static const char zeros[1 << 21] __attribute__((unused));
static size_t zero3[3], one3[3] = {1, 1, 1}, eight = 8, out_size;
static cl_uint out_uint;
static cl_ulong out_ulong;

static int begins(const char *text)
{
	if (number++ < start)
		return 0;
	printf("%d %s: ", number - 1, text);
	fflush(stdout);
	/* A call that never returns is one that the driver dies of. */
	alarm(60);
	code = 0;
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
			printf("%d", (int)(call)); \
			ends(); \
		} \
	} while (0)
#define MADE(text, call) \
	do { \
		if (begins(text)) { \
			int made = !!(call); \
			/* The handle of a call that failed is up to the driver. */ \
			printf("%d %d", code, code ? 0 : made); \
			ends(); \
		} \
	} while (0)
#define ASKED(text, call) \
	do { \
		if (begins(text)) { \
			for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) \
				for (cl_uint param = ranges[i][0]; param <= ranges[i][1]; param++) { \
					size_t size = 4096, ret = 0; \
					void *value = memset(host, 0, 4096); \
					int status = (call); \
					if (status != CL_INVALID_VALUE) \
						printf("%x=%d(%zu) ", param, status, status ? 0 : ret); \
				} \
			ends(); \
		} \
	} while (0)

/* The numbers of properties of all kinds, without CL_QUEUE_SIZE, of no use here, and those that tell of memory at the moment. */
static const cl_uint ranges[][2] = {
	{0, 3}, {0x900, 0x908}, {0x1000, 0x1076}, {0x1080, 0x1098}, {0x1100, 0x1125}, {0x1150, 0x116b}, {0x1180, 0x1186},
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
