/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Included before each file of the core when it is fuzzed: at every access to shared memory, another member may have just stored
 * there. */
#ifndef TFS_FUZZ_HOOKS_H
#define TFS_FUZZ_HOOKS_H

#include "tombolo_atomic.h"

void fuzz_look(const volatile void *p, unsigned bytes);

#undef tmb_load
#undef tmb_load_acquire
#define tmb_load(p) (fuzz_look((p), sizeof(*(p))), __atomic_load_n((p), __ATOMIC_RELAXED))
#define tmb_load_acquire(p) (fuzz_look((p), sizeof(*(p))), __atomic_load_n((p), __ATOMIC_ACQUIRE))

#endif
