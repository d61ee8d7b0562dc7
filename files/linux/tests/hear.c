/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * hear DIR FILE READY: watches a directory and one file with inotify, makes READY once it does, and prints each event until a name "end"
 * comes: what is watched, what happened, the name. Renames print their cookie as a small number, so that halves can be told together.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

#define EVENTS (IN_ATTRIB | IN_MODIFY | IN_CLOSE_WRITE | IN_MOVE | IN_CREATE | IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF)

static const struct {
	uint32_t bit;
	const char *name;
} names[] = {
	{IN_ATTRIB, "ATTRIB"}, {IN_MODIFY, "MODIFY"}, {IN_CLOSE_WRITE, "CLOSE_WRITE"}, {IN_MOVED_FROM, "MOVED_FROM"},
	{IN_MOVED_TO, "MOVED_TO"}, {IN_CREATE, "CREATE"}, {IN_DELETE, "DELETE"}, {IN_DELETE_SELF, "DELETE_SELF"},
	{IN_MOVE_SELF, "MOVE_SELF"}, {IN_IGNORED, "IGNORED"}, {IN_Q_OVERFLOW, "Q_OVERFLOW"}, {IN_ISDIR, "ISDIR"},
};

int main(int argc, char **argv)
{
	char buf[4096] __attribute__((aligned(8)));
	int fd = inotify_init1(IN_CLOEXEC), dir, file;
	uint32_t first_cookie = 0;

	if (argc != 4)
		return 2;
	dir = inotify_add_watch(fd, argv[1], EVENTS);
	file = inotify_add_watch(fd, argv[2], EVENTS);
	if (dir < 0 || file < 0 || close(open(argv[3], O_CREAT | O_WRONLY, 0600))) {
		perror("hear");
		return 1;
	}
	alarm(60);
	for (;;) {
		ssize_t n = read(fd, buf, sizeof(buf));

		if (n <= 0)
			return 1;
		for (char *p = buf; p < buf + n;) {
			struct inotify_event *e = (struct inotify_event *)p;

			p += sizeof(*e) + e->len;
			if (e->len && !strcmp(e->name, "end"))
				return 0;
			printf("%s", e->wd == dir ? "dir" : "file");
			for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
				if (e->mask & names[i].bit)
					printf(" %s", names[i].name);
			if (e->cookie) {
				if (!first_cookie)
					first_cookie = e->cookie;
				printf(" %u", e->cookie - first_cookie);
			}
			printf(" %s\n", e->len ? e->name : "-");
			fflush(stdout);
		}
	}
}
