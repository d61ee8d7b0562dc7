// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * The time after which a VM sees what another VM changed, on a file system that both have mounted. "coherence make DIR" makes the files.
 * "coherence look DIR FLAG SECONDS" looks at each until it is in this VM's caches, makes FLAG.looked, waits for FLAG.changed and
 * looks until it sees each change, or for SECONDS. "coherence change DIR FLAG" waits for FLAG.looked, changes what was looked at
 * and makes FLAG.changed. FLAG lies on a file system on which both see each other's files at once.
 *
 * Prints "WHAT SECONDS", and "unseen" behind it where SECONDS ended first. A look that began after the change had returned and sees it
 * took 0 s. WHAT is
 *   read   the content of a file that this VM keeps open
 *   open   the content of a file that this VM opens again for each look
 *   name   a new name in a directory, which this VM has asked for before
 *   gone   a name that was removed
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define OLD "old data"
#define NEW "new data"
#define LENGTH (sizeof(OLD) - 1)
#define TIMEOUT 60.0

enum what { READ, OPEN, NAME, GONE, KINDS };
static const char *const names[KINDS] = {"read", "open", "name", "gone"};

/* Each kind has a directory of its own, so that looking at one refreshes nothing of another. */
static char dirs[KINDS][4096], files[KINDS][4104];
static int kept = -1;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void pause_ms(long ms)
{
	const struct timespec t = {.tv_nsec = ms * 1000000};

	nanosleep(&t, NULL);
}

static void fail(const char *what, const char *name)
{
	fprintf(stderr, "coherence: %s %s: %s\n", what, name, errno ? strerror(errno) : "gave up");
	exit(1);
}

static void put(const char *name, int flags, const char *text)
{
	int fd = open(name, O_WRONLY | flags, 0644);

	if (fd < 0)
		fail("open", name);
	if (write(fd, text, LENGTH) != (ssize_t)LENGTH)
		fail("write", name);
	if (close(fd))
		fail("close", name);
}

static void raise_flag(const char *flag, const char *which)
{
	char name[4128];
	int fd;

	snprintf(name, sizeof(name), "%s.%s", flag, which);
	fd = open(name, O_CREAT | O_EXCL | O_WRONLY, 0644);
	if (fd < 0)
		fail("create", name);
	close(fd);
}

static void await_flag(const char *flag, const char *which)
{
	double end = now() + TIMEOUT;
	char name[4128];

	snprintf(name, sizeof(name), "%s.%s", flag, which);
	while (access(name, F_OK)) {
		if (errno != ENOENT)
			fail("look for", name);
		if (now() > end) {
			errno = 0;
			fail("waiting for", name);
		}
		pause_ms(1);
	}
}

static int is_new(int fd, const char *name)
{
	char text[LENGTH];
	ssize_t n = pread(fd, text, LENGTH, 0);

	if (n < 0)
		fail("read", name);
	return n == (ssize_t)LENGTH && !memcmp(text, NEW, LENGTH);
}

/* Whether the change of this kind is seen. */
static int look(enum what kind)
{
	const char *name = files[kind];
	struct stat st;
	int fd, seen;

	switch (kind) {
	case READ:
		if (kept < 0)
			kept = open(name, O_RDONLY);
		if (kept < 0)
			fail("open", name);
		return is_new(kept, name);
	case OPEN:
		fd = open(name, O_RDONLY);
		if (fd < 0)
			fail("open", name);
		seen = is_new(fd, name);
		close(fd);
		return seen;
	default:
		if (stat(name, &st) == 0)
			return kind == NAME;
		if (errno != ENOENT)
			fail("stat", name);
		return kind == GONE;
	}
}

static void look_at_all(const char *flag, double seconds)
{
	int seen[KINDS] = {0}, left = KINDS, first = 1;
	double start;

	for (int twice = 0; twice < 2; twice++)
		for (int kind = 0; kind < KINDS; kind++)
			if (look(kind)) {
				errno = 0;
				fail("seen before it was changed:", files[kind]);
			}
	raise_flag(flag, "looked");
	await_flag(flag, "changed");
	start = now();
	while (left) {
		double since = now() - start;

		for (int kind = 0; kind < KINDS; kind++) {
			if (seen[kind] || !look(kind))
				continue;
			seen[kind] = 1;
			left--;
			printf("%s %.3f\n", names[kind], first ? 0.0 : now() - start);
		}
		first = 0;
		if (since > seconds)
			break;
		pause_ms(since < 1 ? 1 : 10);
	}
	for (int kind = 0; kind < KINDS; kind++)
		if (!seen[kind])
			printf("%s %.3f unseen\n", names[kind], seconds);
}

int main(int argc, char **argv)
{
	const char *verb = argc > 2 ? argv[1] : "";

	for (int kind = 0; kind < KINDS && argc > 2; kind++) {
		snprintf(dirs[kind], sizeof(dirs[kind]), "%s/%s", argv[2], names[kind]);
		snprintf(files[kind], sizeof(files[kind]), "%s/file", dirs[kind]);
	}
	if (argc == 3 && !strcmp(verb, "make")) {
		if (mkdir(argv[2], 0755))
			fail("mkdir", argv[2]);
		for (int kind = 0; kind < KINDS; kind++) {
			if (mkdir(dirs[kind], 0755))
				fail("mkdir", dirs[kind]);
			if (kind != NAME)
				put(files[kind], O_CREAT | O_EXCL, OLD);
		}
		/* The other VM must begin with these files, whatever this one's caches hold back. */
		sync();
	} else if (argc == 5 && !strcmp(verb, "look")) {
		look_at_all(argv[3], atof(argv[4]));
	} else if (argc == 4 && !strcmp(verb, "change")) {
		await_flag(argv[3], "looked");
		for (int kind = 0; kind < KINDS; kind++) {
			if (kind != GONE)
				put(files[kind], kind == NAME ? O_CREAT | O_EXCL : 0, NEW);
			else if (unlink(files[kind]))
				fail("unlink", files[kind]);
		}
		raise_flag(argv[3], "changed");
	} else {
		fprintf(stderr, "usage: coherence make DIR | look DIR FLAG SECONDS | change DIR FLAG\n");
		return 2;
	}
	return 0;
}
