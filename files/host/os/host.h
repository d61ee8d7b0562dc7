/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The core's surroundings in user space: struct tfs.os points to one of these, or is NULL. */
#ifndef TFS_HOST_H
#define TFS_HOST_H

#include "tfs.h"

struct tfs_host {
	void *ctx;
	void (*damage)(void *ctx, const char *what, tmb_u64 a, tmb_u64 b);
	void (*ring)(void *ctx, tmb_u32 member);
	void (*waiting)(void *ctx, tmb_u32 member, bool answers, tmb_u64 seconds);
	bool (*killed)(void *ctx); /* the process that this thread works for was killed */
	bool ending; /* no thread may wait any more */
};

#endif
