// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * A program that forks while it uses a device. Whatever the child does with its parent's objects, the parent goes on; the child may have a
 * connection of its own. The argument says what the child does. One that lingers outlives its parent, until its standard input ends.
 */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static cl_platform_id platform;
static cl_device_id device;
static cl_context context;
static cl_command_queue queue;
static cl_mem buffer;

static int fill_and_read(cl_command_queue q, cl_mem m, int value)
{
	int back[1024] = {0};
	int status = clEnqueueFillBuffer(q, m, &value, 4, 0, sizeof back, 0, NULL, NULL);

	status |= clEnqueueReadBuffer(q, m, CL_TRUE, 0, sizeof back, back, 0, NULL, NULL);
	for (int i = 0; i < 1024; i++)
		status |= back[i] != value;
	return status;
}

static int child(const char *does)
{
	cl_int code;

	if (!strcmp(does, "releases")) {
		clReleaseMemObject(buffer);
		clReleaseCommandQueue(queue);
		clReleaseContext(context);
		exit(0);
	}
	if (!strcmp(does, "exits"))
		exit(0);
	if (!strcmp(does, "lingers")) {
		char byte;

		while (read(0, &byte, 1) > 0)
			;
		_exit(0);
	}
	if (!strcmp(does, "uses")) {
		int value = 1, status = clFinish(queue);
		status |= clEnqueueFillBuffer(queue, buffer, &value, 4, 0, 64, 0, NULL, NULL);
		clCreateUserEvent(context, &code);
		_exit(status == CL_OUT_OF_RESOURCES && code == CL_OUT_OF_RESOURCES ? 0 : 1);
	}
	/* Asks for the devices again. */
	clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL);
	cl_context own = clCreateContext(NULL, 1, &device, NULL, NULL, &code);
	cl_command_queue q = clCreateCommandQueueWithProperties(own, device, NULL, &code);
	cl_mem m = clCreateBuffer(own, 0, 4096, NULL, &code);
	code = fill_and_read(q, m, 42);
	clReleaseMemObject(m);
	clReleaseCommandQueue(q);
	clReleaseContext(own);
	clReleaseMemObject(buffer);
	_exit(code ? 1 : 0);
}

int main(int argc, char **argv)
{
	cl_int code;
	int status;

	setbuf(stdout, NULL);
	clGetPlatformIDs(1, &platform, NULL);
	clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL);
	context = clCreateContext(NULL, 1, &device, NULL, NULL, &code);
	queue = clCreateCommandQueueWithProperties(context, device, NULL, &code);
	buffer = clCreateBuffer(context, 0, 4096, NULL, &code);
	printf("before %d\n", fill_and_read(queue, buffer, 1));
	pid_t pid = fork();
	if (!pid)
		return child(argc > 1 ? argv[1] : "");
	if (argc > 1 && !strcmp(argv[1], "lingers"))
		return 0;
	waitpid(pid, &status, 0);
	printf("child %d\n", status);
	for (int i = 2; i < 5; i++)
		printf("after %d\n", fill_and_read(queue, buffer, i));
	return 0;
}
