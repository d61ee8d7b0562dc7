// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * One file from a VM that writes it to another that follows. FILE and FILE.back are there and empty. "handover consume FILE BLOCK"
 * answers in FILE.back that it is there, reads FILE as it grows, and answers when it has read the end; "handover produce FILE BLOCK MIB
 * SECONDS" waits for the consumer, writes blocks until it has written MIB, or for SECONDS, and prints the bytes and the seconds
 * from its first write until it sees the second answer. Each block begins and ends with its number, which the consumer
 * checks; the last one's number is marked.
 *
 * Everything is O_DIRECT, so that a system's caches neither hide what the other VM wrote nor keep from it what is written here.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LAST (1ULL << 63)
#define ANSWER 512 /* bytes of FILE.back; the first word: 1, the consumer is there; 2, it has read all */
#define TIMEOUT 60.0

static const char *file, *back;
static char *buffer;
static size_t block;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void fail(const char *what, const char *name)
{
	fprintf(stderr, "handover: %s %s: %s\n", what, name, errno ? strerror(errno) : "gave up");
	exit(1);
}

/* Nothing new: gives the processor to the others, who share two. */
static void pause_until(double end, const char *what)
{
	const struct timespec t = {.tv_nsec = 100 * 1000};

	if (now() > end) {
		errno = 0;
		fail("waiting for", what);
	}
	nanosleep(&t, NULL);
}

static int open_or_fail(const char *name, int flags)
{
	int fd = open(name, flags | O_DIRECT, 0644);

	if (fd < 0)
		fail("open", name);
	return fd;
}

static void answer(int fd, uint64_t word)
{
	memset(buffer, 0, ANSWER);
	memcpy(buffer, &word, sizeof(word));
	if (pwrite(fd, buffer, ANSWER, 0) != ANSWER)
		fail("write", back);
}

static void await_answer(int fd, uint64_t wanted)
{
	double end = now() + TIMEOUT;
	uint64_t word = 0;

	for (;;) {
		ssize_t n = pread(fd, buffer, ANSWER, 0);

		if (n < 0)
			fail("read", back);
		if (n == ANSWER)
			memcpy(&word, buffer, sizeof(word));
		if (word == wanted)
			return;
		pause_until(end, back);
	}
}

static void produce(uint64_t bytes, double seconds)
{
	int data = open_or_fail(file, O_WRONLY), reply = open_or_fail(back, O_RDONLY);
	uint64_t number = 0, blocks = bytes / block;
	double start;

	await_answer(reply, 1);
	memset(buffer, 7, block);
	start = now();
	for (int last = 0; !last; number++) {
		uint64_t mark;

		last = number + 1 >= blocks || now() - start >= seconds;
		mark = (number + 1) | (last ? LAST : 0);
		memcpy(buffer, &mark, sizeof(mark));
		memcpy(buffer + block - sizeof(mark), &mark, sizeof(mark));
		if (pwrite(data, buffer, block, (off_t)(number * block)) != (ssize_t)block)
			fail("write", file);
	}
	await_answer(reply, 2);
	printf("%llu %.6f\n", (unsigned long long)(number * block), now() - start);
}

static void consume(void)
{
	int data = open_or_fail(file, O_RDONLY), reply = open_or_fail(back, O_WRONLY);
	double end = now() + TIMEOUT;
	uint64_t number = 0, first, second;

	answer(reply, 1);
	for (;;) {
		ssize_t n = pread(data, buffer, block, (off_t)(number * block));

		if (n < 0)
			fail("read", file);
		if (n < (ssize_t)block) { /* not there, or not all of it */
			pause_until(end, file);
			continue;
		}
		memcpy(&first, buffer, sizeof(first));
		memcpy(&second, buffer + block - sizeof(second), sizeof(second));
		if ((first & ~LAST) != ++number || second != first) {
			fprintf(stderr, "handover: block %llu of %s has numbers %llx and %llx\n", (unsigned long long)number, file,
				(unsigned long long)first, (unsigned long long)second);
			exit(1);
		}
		if (first & LAST)
			break;
		end = now() + TIMEOUT;
	}
	answer(reply, 2);
}

int main(int argc, char **argv)
{
	int producer = argc == 6 && !strcmp(argv[1], "produce");
	char name[4096];

	if (!producer && (argc != 4 || strcmp(argv[1], "consume"))) {
		fprintf(stderr, "usage: handover produce FILE BLOCK MIB SECONDS | handover consume FILE BLOCK\n");
		return 2;
	}
	file = argv[2];
	snprintf(name, sizeof(name), "%s.back", file);
	back = name;
	block = strtoul(argv[3], NULL, 10);
	if (block < ANSWER || posix_memalign((void **)&buffer, 4096, block))
		fail("blocks of", argv[3]);
	if (producer)
		produce(strtoull(argv[4], NULL, 10) << 20, atof(argv[5]));
	else
		consume();
	return 0;
}
