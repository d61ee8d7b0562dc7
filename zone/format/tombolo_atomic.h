/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Atomics on memory that other machines share.
 *
 * A kernel with one CPU patches the LOCK prefix out of its own atomic_*(), cmpxchg() and spinlocks; two such guests
 * then lose updates on memory they share. The compiler's builtins are not in the kernel's patch list, so their LOCK
 * stays. Every access to zone memory that another member may write goes through this file, in the kernel too.
 *
 * Values are little endian in memory; only little-endian machines are supported (asserted below).
 */
#ifndef TOMBOLO_ATOMIC_H
#define TOMBOLO_ATOMIC_H

#ifdef __KERNEL__
#include <linux/types.h>
typedef u8 tmb_u8;
typedef u16 tmb_u16;
typedef u32 tmb_u32;
typedef u64 tmb_u64;
typedef s64 tmb_s64;
#else
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
typedef uint8_t tmb_u8;
typedef uint16_t tmb_u16;
typedef uint32_t tmb_u32;
typedef uint64_t tmb_u64;
typedef int64_t tmb_s64;
#endif

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "zone formats are little endian");

/* Relaxed: a single, untorn access that the compiler neither repeats nor merges. */
#define tmb_load(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define tmb_store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define tmb_load_acquire(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define tmb_store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
/* Read-modify-write, sequentially consistent; each returns the value before. */
#define tmb_fetch_add(p, v) __atomic_fetch_add((p), (v), __ATOMIC_SEQ_CST)
#define tmb_fetch_or(p, v) __atomic_fetch_or((p), (v), __ATOMIC_SEQ_CST)
#define tmb_fetch_and(p, v) __atomic_fetch_and((p), (v), __ATOMIC_SEQ_CST)
#define tmb_exchange(p, v) __atomic_exchange_n((p), (v), __ATOMIC_SEQ_CST)
/* Orders earlier stores before later loads, also towards other machines (the kernel's smp_mb() may not). */
#define tmb_fence() __atomic_thread_fence(__ATOMIC_SEQ_CST)

/* Compare and swap; true when *p was 'old' and is now 'new_value'. */
static inline bool tmb_cas64(tmb_u64 *p, tmb_u64 old, tmb_u64 new_value)
{
	return __atomic_compare_exchange_n(p, &old, new_value, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
}

static inline bool tmb_cas32(tmb_u32 *p, tmb_u32 old, tmb_u32 new_value)
{
	return __atomic_compare_exchange_n(p, &old, new_value, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
}

#endif
