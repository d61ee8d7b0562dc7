// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * How the host may access an object (CL_MEM_HOST_…), with each place of its memory: each way to map, read, write and copy, and what its bytes are
 * afterwards. One line per claim, nothing that may differ between two native runs. The argument is the bytes of each buffer.
 */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static cl_platform_id platform;
static cl_device_id device;
static cl_context context;
static cl_command_queue queue;
static cl_mem plain, plain_image;
static size_t size;
static unsigned char *host, *back, *from;
static cl_int code;

static const cl_mem_flags access_flags[] = {0, CL_MEM_HOST_WRITE_ONLY, CL_MEM_HOST_READ_ONLY, CL_MEM_HOST_NO_ACCESS};
static const cl_mem_flags memory_flags[] = {
	0, CL_MEM_ALLOC_HOST_PTR, CL_MEM_COPY_HOST_PTR, CL_MEM_USE_HOST_PTR, CL_MEM_ALLOC_HOST_PTR | CL_MEM_COPY_HOST_PTR,
};
static const cl_map_flags map_flags[] = {
	CL_MAP_READ, CL_MAP_WRITE, CL_MAP_READ | CL_MAP_WRITE, CL_MAP_WRITE_INVALIDATE_REGION,
};
static const size_t zero[3], side[3] = {8, 8, 1}, few[3] = {16, 1, 1};

/* The first and last bytes of an object, by way of another one that the host may read. */
static void bytes(cl_mem m, int is_image)
{
	memset(back, 0xee, size);
	if (is_image) {
		code = clEnqueueCopyImage(queue, m, plain_image, zero, zero, side, 0, NULL, NULL);
		code |= clEnqueueReadImage(queue, plain_image, CL_TRUE, zero, side, 0, 0, back, 0, NULL, NULL);
		printf(" [%d: %d %d %d]", code, back[0], back[1], back[255]);
		return;
	}
	code = clEnqueueCopyBuffer(queue, m, plain, 0, 0, size / 2, 0, NULL, NULL);
	code |= clEnqueueReadBuffer(queue, plain, CL_TRUE, 0, size / 2, back, 0, NULL, NULL);
	printf(" [%d: %d %d %d]", code, back[0], back[1], back[size / 2 - 1]);
}

static void maps(cl_mem m, int is_image, cl_map_flags flags)
{
	size_t pitch;
	unsigned char *p;

	if (is_image)
		p = clEnqueueMapImage(queue, m, CL_TRUE, flags, zero, side, &pitch, NULL, 0, NULL, NULL, &code);
	else
		p = clEnqueueMapBuffer(queue, m, CL_TRUE, flags, 0, size / 2, 0, NULL, NULL, &code);
	printf("  map %d: %d %d", (int)flags, !!p, code);
	if (p) {
		if (flags & CL_MAP_READ)
			printf(" sees %d", p[1]);
		if (flags == CL_MAP_WRITE_INVALIDATE_REGION)
			memset(p, 8, is_image ? 256 : size / 2);
		else if (flags & CL_MAP_WRITE)
			p[1] = 9;
		printf(" unmap %d", clEnqueueUnmapMemObject(queue, m, p, 0, NULL, NULL));
	}
	bytes(m, is_image);
	printf("\n");
}

static void buffer(cl_mem m)
{
	printf("  fill %d", clEnqueueFillBuffer(queue, m, "\1", 1, 0, size / 2, 0, NULL, NULL));
	bytes(m, 0);
	printf("\n");
	for (size_t i = 0; i < sizeof map_flags / sizeof *map_flags; i++)
		maps(m, 0, map_flags[i]);
	back[0] = 77;
	printf("  read %d", clEnqueueReadBuffer(queue, m, CL_TRUE, 0, size / 2, back, 0, NULL, NULL));
	printf(" %d\n  read rect", back[0]);
	printf(" %d\n", clEnqueueReadBufferRect(queue, m, CL_TRUE, zero, zero, few, 0, 0, 0, 0, back, 0, NULL, NULL));
	memset(from, 5, size);
	printf("  write %d", clEnqueueWriteBuffer(queue, m, CL_TRUE, 0, 2, from, 0, NULL, NULL));
	bytes(m, 0);
	printf("\n  write all %d", clEnqueueWriteBuffer(queue, m, CL_TRUE, 0, size / 2, from, 0, NULL, NULL));
	bytes(m, 0);
	memset(from, 6, size);
	printf("\n  write rect %d", clEnqueueWriteBufferRect(queue, m, CL_TRUE, zero, zero, few, 0, 0, 0, 0, from, 0, NULL, NULL));
	bytes(m, 0);
	printf("\n  copy to it %d", clEnqueueCopyBuffer(queue, plain, m, 0, 1, 16, 0, NULL, NULL));
	bytes(m, 0);
	printf("\n");
}

static void image(cl_mem m, cl_mem_flags access)
{
	/* PoCL 3.1 lets the host invalidate an image that it may not write, though the specification forbids it, and may then refuse to unmap it. */
	int refuses = access & (CL_MEM_HOST_READ_ONLY | CL_MEM_HOST_NO_ACCESS);

	unsigned char color[16] = {3, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0, 0, 3};

	printf("  fill %d", clEnqueueFillImage(queue, m, color, zero, side, 0, NULL, NULL));
	bytes(m, 1);
	printf("\n");
	for (size_t i = 0; i < sizeof map_flags / sizeof *map_flags; i++)
		if (map_flags[i] != CL_MAP_WRITE_INVALIDATE_REGION || !refuses)
			maps(m, 1, map_flags[i]);
	back[0] = 77;
	printf("  read %d", clEnqueueReadImage(queue, m, CL_TRUE, zero, side, 0, 0, back, 0, NULL, NULL));
	memset(from, 5, size);
	printf(" %d\n  write %d", back[0], clEnqueueWriteImage(queue, m, CL_TRUE, zero, side, 0, 0, from, 0, NULL, NULL));
	bytes(m, 1);
	printf("\n  copy to it %d", clEnqueueCopyImage(queue, plain_image, m, zero, zero, side, 0, NULL, NULL));
	bytes(m, 1);
	printf("\n  copy to a buffer %d", clEnqueueCopyImageToBuffer(queue, m, plain, zero, side, 0, 0, NULL, NULL));
	printf("\n  copy from a buffer %d", clEnqueueCopyBufferToImage(queue, plain, m, 0, zero, side, 0, NULL, NULL));
	bytes(m, 1);
	printf("\n");
}

static void objects(cl_mem_flags access, cl_mem_flags memory)
{
	cl_image_format format = {CL_RGBA, CL_UNSIGNED_INT8};
	cl_image_desc desc = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = 8, .image_height = 8};
	cl_buffer_region half = {0, size / 2};
	void *first = memory & (CL_MEM_COPY_HOST_PTR | CL_MEM_USE_HOST_PTR) ? memset(host, 4, size) : NULL;
	cl_mem m = clCreateBuffer(context, access | memory, size, first, &code), part;

	printf("buffer %d %d: %d\n", (int)access, (int)memory, code);
	if (m)
		buffer(m);
	for (int i = 0; m && i < 4; i++) {
		part = clCreateSubBuffer(m, access_flags[i], CL_BUFFER_CREATE_TYPE_REGION, &half, &code);
		printf(" its part %d: %d\n", (int)access_flags[i], code);
		if (part) {
			buffer(part);
			clReleaseMemObject(part);
		}
	}
	if (m)
		clReleaseMemObject(m);
	m = clCreateImage(context, access | memory, &format, &desc, first ? memset(host, 4, size) : NULL, &code);
	printf("image %d %d: %d\n", (int)access, (int)memory, code);
	if (m) {
		image(m, access);
		clReleaseMemObject(m);
	}
}

int main(int argc, char **argv)
{
	cl_image_format format = {CL_RGBA, CL_UNSIGNED_INT8};
	cl_image_desc desc = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = 8, .image_height = 8};

	size = argc > 1 ? strtoul(argv[1], NULL, 0) : 4096;
	host = aligned_alloc(4096, size);
	back = aligned_alloc(4096, size);
	from = aligned_alloc(4096, size);
	clGetPlatformIDs(1, &platform, NULL);
	clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL);
	context = clCreateContext(NULL, 1, &device, NULL, NULL, &code);
	queue = clCreateCommandQueueWithProperties(context, device, NULL, &code);
	plain = clCreateBuffer(context, 0, size, NULL, &code);
	plain_image = clCreateImage(context, 0, &format, &desc, NULL, &code);
	for (int a = 0; a < 4; a++)
		for (size_t i = 0; i < sizeof memory_flags / sizeof *memory_flags; i++)
			objects(access_flags[a], memory_flags[i]);
	printf("finish %d\n", clFinish(queue));
	return 0;
}
