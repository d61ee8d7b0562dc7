// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * A command fails that the program didn't wait for: here a launch with a buffer beyond the client's quota (a MiB), all of which looked good. The
 * next call that waits returns the error, and no read returns bytes as if they were the result.
 */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <stdio.h>

static cl_context context;
static cl_command_queue queue;
static cl_kernel kernel;
static cl_mem small;

/* Launches with a buffer that the server hasn't; which of these calls failed, the program isn't told yet. */
static cl_event fail(void)
{
	cl_int code;
	cl_event event;
	size_t one = 1;
	cl_mem large = clCreateBuffer(context, 0, 8 << 20, NULL, &code);

	clSetKernelArg(kernel, 0, sizeof large, &large);
	clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &one, &one, 0, NULL, &event);
	clReleaseMemObject(large);
	return event;
}

/* And all is well again. */
static void recover(void)
{
	int data = 0, zero = 0;
	size_t one = 1;
	int status = clSetKernelArg(kernel, 0, sizeof small, &small);

	status |= clEnqueueFillBuffer(queue, small, &zero, 4, 0, 4, 0, NULL, NULL);
	status |= clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &one, &one, 0, NULL, NULL);
	status |= clEnqueueReadBuffer(queue, small, CL_TRUE, 0, 4, &data, 0, NULL, NULL);
	printf(" then %d %d\n", status, data);
}

int main(void)
{
	const char *source = "kernel void a(global int *to) { to[0] = 7; }";
	cl_platform_id platform;
	cl_device_id device;
	cl_int code, data = 0, status;
	cl_event event, read, marker;
	void *p;

	setbuf(stdout, NULL);
	clGetPlatformIDs(1, &platform, NULL);
	clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL);
	context = clCreateContext(NULL, 1, &device, NULL, NULL, &code);
	queue = clCreateCommandQueueWithProperties(context, device, NULL, &code);
	small = clCreateBuffer(context, 0, 64, NULL, &code);
	cl_program program = clCreateProgramWithSource(context, 1, &source, NULL, &code);
	clBuildProgram(program, 0, NULL, NULL, NULL, NULL);
	kernel = clCreateKernel(program, "a", &code);
	printf("warm"), recover();

	fail();
	printf("blocking read %d", clEnqueueReadBuffer(queue, small, CL_TRUE, 0, 4, &data, 0, NULL, NULL)), recover();
	fail();
	printf("finish %d", clFinish(queue)), recover();
	event = fail();
	printf("its event %d", clWaitForEvents(1, &event)), recover();
	event = fail();
	clGetEventInfo(event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof status, &status, NULL);
	printf("its status %d, finish %d", status, clFinish(queue)), recover();
	fail();
	data = -1;
	status = clEnqueueReadBuffer(queue, small, CL_FALSE, 0, 4, &data, 0, NULL, &read);
	printf("read %d, waited %d, data %d", status, clWaitForEvents(1, &read), data), recover();
	fail();
	status = clEnqueueMarkerWithWaitList(queue, 0, NULL, &marker);
	printf("marker %d, waited %d", status, clWaitForEvents(1, &marker)), recover();
	fail();
	p = clEnqueueMapBuffer(queue, small, CL_TRUE, CL_MAP_READ, 0, 4, 0, NULL, NULL, &code);
	printf("map %d %d", !!p, code), recover();
	event = fail();
	status = clEnqueueFillBuffer(queue, small, &data, 4, 0, 4, 1, &event, NULL);
	printf("fill %d, finish %d", status, clFinish(queue)), recover();
	return 0;
}
