// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * The demo's programs inside the VMs and on the host, which meet in a mapped file.
 *
 *	share produce FILE COUNT	sends COUNT numbers through a ring in FILE
 *	share consume FILE COUNT	receives them, checks each, prints the rate
 *	share hold FILE			maps FILE, reads all of it, prints its sum and keeps it mapped until standard input ends
 */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 4096u
#define TIMEOUT_S 120.0

struct ring {
	_Alignas(64) _Atomic uint64_t head; /* the producer's */
	_Alignas(64) _Atomic uint64_t tail; /* the consumer's */
	_Alignas(64) uint64_t slot[SLOTS];
};

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void *map(const char *path, int flags, size_t *size)
{
	int fd = open(path, flags, 0666);
	struct stat st;
	void *p;

	if (fd < 0 || (*size && ftruncate(fd, (off_t)*size)) || fstat(fd, &st)) {
		fprintf(stderr, "share: %s: %s\n", path, strerror(errno));
		exit(1);
	}
	*size = (size_t)st.st_size;
	p = mmap(NULL, *size, flags & O_RDWR ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED) {
		fprintf(stderr, "share: can't map %s: %s\n", path, strerror(errno));
		exit(1);
	}
	close(fd);
	return p;
}

static uint64_t message(uint64_t i)
{
	return i * 0x9e3779b97f4a7c15u;
}

/* Waits, giving the CPU away, until the other side has moved on. */
static void await(_Atomic uint64_t *where, uint64_t stuck_at, double since)
{
	while (atomic_load_explicit(where, memory_order_acquire) == stuck_at) {
		if (now() - since > TIMEOUT_S) {
			fprintf(stderr, "share: the other side does not come\n");
			exit(1);
		}
		sched_yield();
	}
}

static int produce(const char *path, uint64_t count)
{
	size_t size = sizeof(struct ring);
	struct ring *ring = map(path, O_RDWR | O_CREAT, &size);
	double since = now();

	for (uint64_t i = 0; i < count; i++) {
		if (i >= SLOTS)
			await(&ring->tail, i - SLOTS, since);
		ring->slot[i % SLOTS] = message(i);
		atomic_store_explicit(&ring->head, i + 1, memory_order_release);
	}
	await(&ring->tail, count - 1, since);
	return 0;
}

static int consume(const char *path, uint64_t count)
{
	size_t size = sizeof(struct ring);
	struct ring *ring = map(path, O_RDWR | O_CREAT, &size);
	double since = now(), first;

	await(&ring->head, 0, since);
	first = now();
	for (uint64_t i = 0; i < count; i++) {
		await(&ring->head, i, since);
		if (ring->slot[i % SLOTS] != message(i)) {
			fprintf(stderr, "share: message %llu is not what was sent\n", (unsigned long long)i);
			return 1;
		}
		atomic_store_explicit(&ring->tail, i + 1, memory_order_release);
	}
	printf("%llu messages, all as sent, %.0f per second\n", (unsigned long long)count, (double)count / (now() - first));
	return 0;
}

static int hold(const char *path)
{
	size_t size = 0;
	const uint64_t *words = map(path, O_RDONLY, &size);
	uint64_t sum = 0;
	char c;

	for (size_t i = 0; i < size / sizeof(*words); i++)
		sum += words[i];
	printf("%zu MiB mapped, sum %016llx\n", size >> 20, (unsigned long long)sum);
	fflush(stdout);
	while (read(0, &c, 1) > 0)
		;
	return 0;
}

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "produce"))
		return produce(argv[2], strtoull(argv[3], NULL, 10));
	if (argc == 4 && !strcmp(argv[1], "consume"))
		return consume(argv[2], strtoull(argv[3], NULL, 10));
	if (argc == 3 && !strcmp(argv[1], "hold"))
		return hold(argv[2]);
	fprintf(stderr, "usage: share produce|consume FILE COUNT | share hold FILE\n");
	return 2;
}
