/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Damages a zone like a hostile member, for tests (files/fuzz/mutate.c):
 *	damage images ZONE BASE SEED N   puts back what is different from BASE, then overwrites N words
 *	damage live ZONE SEED N          overwrites N words, one after the other, some while they are used
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../../fuzz/mutate.h"
#include "tombolo_zone.h"

static tmb_u64 state;

static tmb_u64 next(void *ctx, unsigned bytes)
{
	tmb_u64 z = state += 0x9e3779b97f4a7c15;

	(void)ctx;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return (z ^ z >> 31) >> (64 - 8 * bytes);
}

static tmb_u8 *map(const char *path, int flags, size_t *bytes)
{
	struct stat st;
	int fd = open(path, flags);
	void *at;

	if (fd < 0 || fstat(fd, &st)) {
		perror(path);
		exit(1);
	}
	*bytes = (size_t)st.st_size;
	at = mmap(NULL, *bytes, flags == O_RDONLY ? PROT_READ : PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED) {
		perror(path);
		exit(1);
	}
	return at;
}

/* Some part of one structure again and again, as long as a test needs to come by there. */
static void pause_a_little(void)
{
	struct timespec t = {0, (long)(next(NULL, 2) * 30)};

	nanosleep(&t, NULL);
}

static void change(tmb_u8 *area, tmb_u64 length, tmb_u64 n, bool live)
{
	struct mutator *m = NULL;

	for (tmb_u64 i = 0; i < n; i++) {
		struct mutation did;

		if (!m || (live && !(i % 32))) { /* what is there by now */
			if (m)
				mutator_free(m);
			m = mutator_new(area, length);
			if (!m)
				exit(1);
		}
		did = mutate(m, area, next, NULL);
		if (!live) {
			printf("%s %#llx: %#llx -> %#llx\n", mutation_names[did.kind], (unsigned long long)did.offset,
			       (unsigned long long)did.old, (unsigned long long)did.new_value);
			continue;
		}
		/* Back and forth, so that one look sees this and the next one that. */
		for (tmb_u64 k = next(NULL, 1) % 8; k; k--) {
			pause_a_little();
			tmb_store((tmb_u64 *)(area + did.offset), k & 1 ? did.new_value : did.old);
		}
		pause_a_little();
	}
	mutator_free(m);
}

int main(int argc, char **argv)
{
	size_t bytes, other;
	tmb_u64 files, length;
	tmb_u8 *zone;
	bool images = argc == 6 && !strcmp(argv[1], "images");

	if (!images && (argc != 5 || strcmp(argv[1], "live")))
		return 2;
	zone = map(argv[2], O_RDWR, &bytes);
	state = strtoull(argv[argc - 2], NULL, 0);
	if (images) {
		tmb_u8 *base = map(argv[3], O_RDONLY, &other);

		for (size_t at = 0; at < bytes && at < other; at += 4096)
			if (memcmp(zone + at, base + at, 4096))
				memcpy(zone + at, base + at, 4096);
	}
	files = ((struct tmb_zone_header *)zone)->areas[0].offset;
	length = ((struct tmb_zone_header *)zone)->areas[0].length;
	change(zone + files, length, strtoull(argv[argc - 1], NULL, 0), !images);
	return 0;
}
