// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Further calls whose answers must be the native driver's, each of which was answered otherwise once. As in calls.c: one line per claim,
 * nothing that may differ between two native runs. With the argument 'own': those that reach the program's own memory.
 */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static cl_platform_id platform;
static cl_device_id device;
static cl_context context;
static cl_command_queue queue;
static int code;

#define SAY(call) printf("%-4d %s\n", (int)(call), #call)
#define MAKE(result, call) ((result) = (call), printf("%-4d %s\n", code, #call))

static cl_kernel kernel_of(const char *source, const char *options, const char *name)
{
	cl_program program;
	cl_kernel kernel;

	MAKE(program, clCreateProgramWithSource(context, 1, &source, NULL, &code));
	SAY(clBuildProgram(program, 0, NULL, options, NULL, NULL));
	MAKE(kernel, clCreateKernel(program, name, &code));
	clReleaseProgram(program);
	return kernel;
}

static void image_maps(void)
{
	cl_image_format format = {CL_RGBA, CL_UNSIGNED_INT8};
	cl_image_desc desc = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = 16, .image_height = 8};
	unsigned char pixels[8][16][4];
	cl_mem kinds[2];
	size_t origin[3] = {0}, region[3] = {16, 8, 1}, row;
	cl_event event;
	cl_int status = 9;
	unsigned char *p;

	memset(pixels, 7, sizeof pixels);
	MAKE(kinds[0], clCreateImage(context, CL_MEM_COPY_HOST_PTR, &format, &desc, pixels, &code));
	MAKE(kinds[1], clCreateImage(context, CL_MEM_USE_HOST_PTR, &format, &desc, pixels, &code));
	for (int i = 0; i < 2; i++) {
		MAKE(p, clEnqueueMapImage(queue, kinds[i], CL_TRUE, CL_MAP_READ, origin, region, &row, NULL, 0, NULL, NULL, &code));
		printf("     mapped %d\n", p ? p[5] : -1);
		SAY(clEnqueueUnmapMemObject(queue, kinds[i], p, 0, NULL, &event));
		SAY(clWaitForEvents(1, &event));
		SAY(clGetEventInfo(event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof status, &status, NULL));
		printf("     status %d\n", status);
		SAY(clFinish(queue));
		clReleaseEvent(event);
		clReleaseMemObject(kinds[i]);
	}
}

/* A buffer over shared virtual memory is at the address that the program knows, also for kernels. */
static void shared_memory(void)
{
	cl_kernel kernel = kernel_of("kernel void own(global long *at) { at[0] = (long)at; at[1] = (long)(at + 1); }", "", "own");
	long *shared = clSVMAlloc(context, CL_MEM_READ_WRITE, 4096, 0);
	char pattern[4] = {1, 2, 3, 4};
	cl_bool uses = 5;
	size_t one = 1;
	cl_mem m;

	printf("     shared %d\n", !!shared);
	if (!shared)
		return;
	SAY(clEnqueueSVMMemFill(queue, shared, pattern, 4, 4096, 0, NULL, NULL));
	SAY(clFinish(queue));
	printf("     filled %lx\n", shared[511]);
	MAKE(m, clCreateBuffer(context, CL_MEM_USE_HOST_PTR, 4096, shared, &code));
	SAY(clGetMemObjectInfo(m, CL_MEM_USES_SVM_POINTER, sizeof uses, &uses, NULL));
	printf("     uses %u\n", uses);
	SAY(clSetKernelArg(kernel, 0, sizeof m, &m));
	SAY(clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &one, NULL, 0, NULL, NULL));
	SAY(clFinish(queue));
	printf("     at its own address %d %d\n", shared[0] == (long)shared, shared[1] == (long)(shared + 1));
	void *p;
	MAKE(p, clEnqueueMapBuffer(queue, m, CL_TRUE, CL_MAP_READ, 8, 8, 0, NULL, NULL, &code));
	printf("     mapped there %d\n", p == shared + 1);
	SAY(clEnqueueUnmapMemObject(queue, m, p, 0, NULL, NULL));
	SAY(clReleaseMemObject(m));
	SAY(clFinish(queue));
	clReleaseKernel(kernel);
	clSVMFree(context, shared);
}

/* Of the program's own memory, at their places in the queue. The PoCL of Debian 13 announces that it could do so for kernels too, and dies of it. */
static void own_memory(void)
{
	long *shared = clSVMAlloc(context, CL_MEM_READ_WRITE, 4096, 0);
	char host[64] = {0}, other[64] = {0}, pattern[4] = {1, 2, 3, 4};
	cl_event event;

	printf("     shared %d\n", !!shared);
	if (!shared)
		return;
	SAY(clEnqueueSVMMemFill(queue, shared, pattern, 4, 4096, 0, NULL, NULL));
	SAY(clEnqueueSVMMemFill(queue, host, pattern, 4, 64, 0, NULL, NULL));
	SAY(clEnqueueSVMMemcpy(queue, CL_FALSE, other, host, 64, 0, NULL, &event));
	SAY(clWaitForEvents(1, &event));
	printf("     filled and copied %d %d\n", host[63], other[62]);
	SAY(clEnqueueSVMMemcpy(queue, CL_TRUE, host, shared + 500, 64, 0, NULL, NULL));
	SAY(clEnqueueSVMMemcpy(queue, CL_TRUE, shared, other, 64, 0, NULL, NULL));
	printf("     there and back %d %lx\n", host[1], shared[0]);
	SAY(clEnqueueSVMMemFill(queue, host, pattern, 3, 63, 0, NULL, NULL));
	SAY(clEnqueueSVMMemFill(queue, host, pattern, 4, 62, 0, NULL, NULL));
	SAY(clEnqueueSVMMemFill(queue, NULL, pattern, 4, 64, 0, NULL, NULL));
	clReleaseEvent(event);
	clSVMFree(context, shared);
}

/* Answers that change while an object lives. */
static void changing(void)
{
	cl_kernel kernel = kernel_of("kernel void k(local int *a, local int *b) { a[0] = b[0] = 1; }", "", "k");
	cl_device_partition_property halves[] = {CL_DEVICE_PARTITION_EQUALLY, 1, 0};
	cl_device_id parts[64];
	cl_uint made = 0, refs = 9;
	cl_ulong bytes = 9;

	for (size_t n = 0; n < 3; n++) {
		SAY(clGetKernelWorkGroupInfo(kernel, device, CL_KERNEL_LOCAL_MEM_SIZE, sizeof bytes, &bytes, NULL));
		printf("     %lu bytes of local memory\n", (long)bytes);
		SAY(clSetKernelArg(kernel, n % 2, 256 << n, NULL));
	}
	SAY(clCreateSubDevices(device, halves, 64, parts, &made));
	for (int i = 0; i < 4 && made; i++) {
		SAY(clGetDeviceInfo(parts[0], CL_DEVICE_REFERENCE_COUNT, sizeof refs, &refs, NULL));
		printf("     %u references\n", refs);
		if (i < 2)
			SAY(clRetainDevice(parts[0]));
		else
			SAY(clReleaseDevice(parts[0]));
	}
	for (cl_uint i = 0; i < made; i++)
		clReleaseDevice(parts[i]);
	SAY(clGetDeviceInfo(device, CL_DEVICE_REFERENCE_COUNT, sizeof refs, &refs, NULL));
	printf("     %u references of a root device\n", refs);
	clReleaseKernel(kernel);
}

/* The output of kernels comes before a call that waits for them returns, and after the program's own output before. */
static void printing(void)
{
	cl_kernel kernel = kernel_of("kernel void say(int n) { for (int i = 0; i < n; i++) printf(\"     a kernel says %d of %d\\n\", i, n); }", "", "say");
	int counts[] = {3, 2, 200};
	size_t one = 1;
	cl_event event;

	for (int i = 0; i < 3; i++) {
		SAY(clSetKernelArg(kernel, 0, sizeof counts[i], &counts[i]));
		fflush(stdout);
		code = clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &one, &one, 0, NULL, &event);
		int waited = i == 1 ? clWaitForEvents(1, &event) : clFinish(queue);
		printf("     launched %d, waited %d\n", code, waited);
		fflush(stdout);
		clReleaseEvent(event);
	}
	clReleaseKernel(kernel);
}

static void programs(void)
{
	const char *empty = "", *text = "kernel void f(global int *data, ulong n, local int *tmp) { data[0] = n; }";
	const char *parts[] = {"kernel void g(", "", "int n) {}"};
	size_t none = 0, lengths[] = {0, 0, 0}, size;
	const char *options[] = {NULL, "", "-DX=1", "-cl-kernel-arg-info", " -cl-kernel-arg-info -DX "};
	cl_program p;
	char name[64];

	MAKE(p, clCreateProgramWithSource(context, 1, &empty, &none, &code));
	SAY(clBuildProgram(p, 0, NULL, NULL, NULL, NULL));
	SAY(clGetProgramInfo(p, CL_PROGRAM_SOURCE, 0, NULL, &size));
	printf("     source of %zu\n", size);
	clReleaseProgram(p);
	MAKE(p, clCreateProgramWithSource(context, 3, parts, lengths, &code));
	SAY(clBuildProgram(p, 0, NULL, NULL, NULL, NULL));
	clReleaseProgram(p);
	for (int i = 0; i < 5; i++) {
		char said[64] = "-";
		cl_kernel k;
		cl_kernel_arg_address_qualifier space = 0;
		MAKE(p, clCreateProgramWithSource(context, 1, &text, NULL, &code));
		SAY(clBuildProgram(p, 0, NULL, options[i], NULL, NULL));
		SAY(clGetProgramBuildInfo(p, device, CL_PROGRAM_BUILD_OPTIONS, sizeof said, said, &size));
		printf("     options of %zu: %s\n", size, said);
		MAKE(k, clCreateKernel(p, "f", &code));
		strcpy(name, "-");
		SAY(clGetKernelArgInfo(k, 0, CL_KERNEL_ARG_NAME, sizeof name, name, NULL));
		SAY(clGetKernelArgInfo(k, 2, CL_KERNEL_ARG_ADDRESS_QUALIFIER, sizeof space, &space, NULL));
		printf("     %s %x\n", name, space);
		SAY(clGetKernelArgInfo(k, 7, CL_KERNEL_ARG_NAME, sizeof name, name, NULL));
		clReleaseKernel(k);
		clReleaseProgram(p);
	}
}

/* A parameter that is passed by value gets the program's bytes, also when those happen to be a handle. */
static void arguments(void)
{
	cl_kernel kernel = kernel_of("typedef ulong word; kernel void a(ulong x, word y, global ulong *to) { to[0] = x; to[1] = y; }", "", "a");
	cl_mem m;
	cl_sampler sampler;
	uint64_t back[2] = {0};
	size_t one = 1;

	MAKE(m, clCreateBuffer(context, 0, 64, NULL, &code));
	MAKE(sampler, clCreateSampler(context, CL_FALSE, CL_ADDRESS_NONE, CL_FILTER_NEAREST, &code));
	for (int i = 0; i < 2; i++) {
		SAY(clSetKernelArg(kernel, 0, sizeof m, &m));
		SAY(clSetKernelArg(kernel, 1, sizeof sampler, &sampler));
		SAY(clSetKernelArg(kernel, 2, sizeof m, &m));
		SAY(clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &one, NULL, 0, NULL, NULL));
		SAY(clEnqueueReadBuffer(queue, m, CL_TRUE, 0, sizeof back, back, 0, NULL, NULL));
		printf("     the program's own values %d %d\n", back[0] == (uintptr_t)m, back[1] == (uintptr_t)sampler);
	}
	cl_mem none = NULL;
	SAY(clSetKernelArg(kernel, 2, sizeof none, &none));
	SAY(clSetKernelArg(kernel, 2, sizeof none, NULL));
	SAY(clSetKernelArg(kernel, 2, 4, &none));
	SAY(clSetKernelArg(kernel, 0, sizeof none, NULL));
	SAY(clSetKernelArg(kernel, 0, 4, &none));
	SAY(clSetKernelArg(kernel, 3, sizeof m, &m));
	clReleaseKernel(kernel);
	clReleaseSampler(sampler);
	clReleaseMemObject(m);
}

static void properties(void)
{
	cl_context_properties own = (cl_context_properties)platform;
	cl_context_properties twice[] = {CL_CONTEXT_PLATFORM, own, CL_CONTEXT_PLATFORM, own, 0};
	cl_context_properties sync[] = {CL_CONTEXT_INTEROP_USER_SYNC, 1, CL_CONTEXT_INTEROP_USER_SYNC, 1, 0};
	cl_context_properties unknown[] = {0x9999, 1, 0};
	cl_queue_properties odd[] = {0x9999, 1, 0}, none[] = {0};
	cl_context c;
	cl_command_queue q, is = (void *)5;
	cl_mem m;
	cl_sampler s;
	char host[64];
	size_t size = 0;
	cl_uint n;

	MAKE(c, clCreateContext(twice, 1, &device, NULL, NULL, &code));
	MAKE(c, clCreateContext(sync, 1, &device, NULL, NULL, &code));
	MAKE(c, clCreateContext(unknown, 1, &device, NULL, NULL, &code));
	MAKE(c, clCreateContextFromType(twice, CL_DEVICE_TYPE_ALL, NULL, NULL, &code));
	MAKE(q, clCreateCommandQueueWithProperties(context, device, odd, &code));
	MAKE(m, clCreateBufferWithProperties(context, odd, 0, 64, NULL, &code));
	MAKE(m, clCreateBufferWithProperties(context, none, 0, 64, NULL, &code));
	clReleaseMemObject(m);
	cl_image_format format = {CL_RGBA, CL_UNSIGNED_INT8};
	cl_image_desc desc = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = 16, .image_height = 8};
	MAKE(m, clCreateImageWithProperties(context, odd, 0, &format, &desc, NULL, &code));
	MAKE(s, clCreateSamplerWithProperties(context, odd, &code));
	SAY(clCreateSubDevices(device, (cl_device_partition_property[]){0x9999, 1, 0}, 0, NULL, &n));
	SAY(clGetCommandQueueInfo(queue, CL_QUEUE_DEVICE_DEFAULT, sizeof is, &is, &size));
	printf("     default %d of %zu\n", !!is, size);
	/* Of several wrong arguments the first is reported. */
	MAKE(m, clCreateBuffer(context, (cl_mem_flags)1 << 40, 64, host, &code));
	MAKE(m, clCreateBuffer(context, CL_MEM_READ_WRITE | CL_MEM_WRITE_ONLY, 64, host, &code));
	MAKE(m, clCreateBuffer(context, 0, 0, host, &code));
	MAKE(m, clCreateBuffer(context, CL_MEM_USE_HOST_PTR | CL_MEM_ALLOC_HOST_PTR, 0, host, &code));
	MAKE(m, clCreateBuffer(context, CL_MEM_USE_HOST_PTR | CL_MEM_COPY_HOST_PTR, 64, NULL, &code));
	MAKE(m, clCreateBuffer(context, CL_MEM_USE_HOST_PTR, 0, NULL, &code));
	(void)c, (void)q, (void)s;
}

int main(int n, char **v)
{
	SAY(clGetPlatformIDs(1, &platform, NULL));
	SAY(clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL));
	MAKE(context, clCreateContext(NULL, 1, &device, NULL, NULL, &code));
	MAKE(queue, clCreateCommandQueueWithProperties(context, device, NULL, &code));
	if (n > 1 && !strcmp(v[1], "own")) {
		own_memory();
	} else {
		image_maps();
			shared_memory();
		changing();
		printing();
		programs();
		arguments();
		properties();
	}
	SAY(clReleaseCommandQueue(queue));
	SAY(clReleaseContext(context));
	return 0;
}
