// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * A model's weights as programs of inference read them: weights make FILE MIB writes a file in the format safetensors with one tensor of this
 * many MiB. weights read FILE maps it read-only, looks up the tensor and touches each of its pages and its last byte; it prints the seconds
 * from open(2) to that byte. A page that has other bytes than were written is an error.
 *
 * safetensors: the size of the header (64 bits, little endian), the header (JSON), the tensors' bytes.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* The header is padded with blanks, so that the tensor begins at a page, as those who write large files do. */
#define START 4096
#define PAGE 4096
#define MIB (1024 * 1024)

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void fail(const char *what, const char *name)
{
	fprintf(stderr, "weights: %s %s: %s\n", what, name, strerror(errno));
	exit(1);
}

/* The byte that the tensor has at this place; neighbouring pages differ. */
static unsigned char byte_at(uint64_t at)
{
	return (unsigned char)(at / PAGE * 31 + at);
}

static void write_all(int fd, const void *bytes, size_t count, const char *path)
{
	const char *from = bytes;

	while (count) {
		ssize_t n = write(fd, from, count);

		if (n < 0)
			fail("can't write", path);
		from += n;
		count -= (size_t)n;
	}
}

static void make(const char *path, uint64_t size)
{
	static unsigned char block[MIB];
	char header[START];
	uint64_t length = START - sizeof length, done = 0;
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644), n;

	if (fd < 0)
		fail("can't make", path);
	memset(header, ' ', sizeof header);
	memcpy(header, &length, sizeof length);
	n = snprintf(header + sizeof length, sizeof header - sizeof length,
		     "{\"weight\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[0,%llu]}}", (unsigned long long)size,
		     (unsigned long long)size);
	header[sizeof length + (size_t)n] = ' ';
	write_all(fd, header, sizeof header, path);
	for (; done < size; done += MIB) {
		for (size_t i = 0; i < MIB; i++)
			block[i] = byte_at(done + i);
		write_all(fd, block, MIB, path);
	}
	if (fsync(fd) || close(fd))
		fail("can't write", path);
}

/* Where the tensor begins and ends in the mapping of `size` bytes. */
static void tensor(const unsigned char *file, uint64_t size, uint64_t *begin, uint64_t *end)
{
	static const char key[] = "\"data_offsets\":[";
	unsigned long long from, to;
	uint64_t length;
	char *header, *at;

	memcpy(&length, file, sizeof length);
	if (size < START || length > size - sizeof length) {
		fprintf(stderr, "weights: no file of safetensors\n");
		exit(1);
	}
	header = strndup((const char *)file + sizeof length, length);
	at = header ? strstr(header, key) : NULL;
	if (!at || sscanf(at + strlen(key), "%llu,%llu", &from, &to) != 2 || from > to || to > size - sizeof length - length) {
		fprintf(stderr, "weights: its header names no tensor\n");
		exit(1);
	}
	free(header);
	*begin = sizeof length + length + from;
	*end = sizeof length + length + to;
}

static void touch(const unsigned char *file, uint64_t begin, uint64_t at)
{
	if (file[begin + at] == byte_at(at))
		return;
	fprintf(stderr, "weights: another byte than was written at %llu\n", (unsigned long long)at);
	exit(1);
}

static void look(const char *path)
{
	double start = now();
	int fd = open(path, O_RDONLY);
	uint64_t begin, end, at;
	unsigned char *file;
	struct stat st;

	if (fd < 0 || fstat(fd, &st))
		fail("can't open", path);
	file = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
	if (file == MAP_FAILED)
		fail("can't map", path);
	tensor(file, (uint64_t)st.st_size, &begin, &end);
	for (at = 0; at < end - begin; at += PAGE)
		touch(file, begin, at);
	touch(file, begin, end - begin - 1);
	printf("%.6f\n", now() - start);
}

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "make") && atol(argv[3]) > 0)
		make(argv[2], (uint64_t)atol(argv[3]) * MIB);
	else if (argc == 3 && !strcmp(argv[1], "read"))
		look(argv[2]);
	else
		return fprintf(stderr, "usage: weights make FILE MIB | weights read FILE\n"), 2;
	return 0;
}
