/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A key-value store as a service: keys of up to 48 bytes, values of up to 256, 1024 of them, shared by all clients. A client puts the key at the
 * start of its window and a value behind the key.
 *
 * A slot has two values, of which the low bit of `turn` names the one that is valid: put() fills the other one, then switches by one store.
 */
#include <tombolo/service.h>

#define SLOTS 1024
#define KEY_MAX 48
#define VALUE_MAX 256

struct slot {
	uint32_t turn; /* 0: free; 1: deleted; from 2 on: used, and its low bit names the valid value */
	uint32_t key_len;
	uint32_t len[2];
	unsigned char key[KEY_MAX];
	unsigned char value[2][VALUE_MAX];
};

static struct slot slots[SLOTS];

static uint32_t hash(const unsigned char *key, uint64_t len)
{
	uint32_t h = 2166136261u;

	while (len--)
		h = (h ^ *key++) * 16777619u;
	return h;
}

/* The key's slot, or else with `make` one that is free or deleted. NULL: there is none. */
static struct slot *find(const unsigned char *key, uint64_t len, int make)
{
	struct slot *room = NULL;
	uint32_t at = hash(key, len);

	for (int i = 0; i < SLOTS; i++) {
		struct slot *s = &slots[(at + i) % SLOTS];

		if (s->turn >= 2 && s->key_len == len && !memcmp(s->key, key, len))
			return s;
		if (s->turn < 2 && !room)
			room = s;
		if (!s->turn)
			break;
	}
	return make ? room : NULL;
}

/* Copies the key out of the window. 0: it has no possible length. */
static int take_key(const struct tombolo_visit *v, uint64_t len, unsigned char *key)
{
	if (!len || len > KEY_MAX || len > v->window_size)
		return 0;
	memcpy(key, v->window, len);
	return 1;
}

/* put(key_len, value_len): 0, or 1 if it is too long, or 2 if the store is full. */
uint64_t put(const struct tombolo_visit *v, uint64_t key_len, uint64_t len, uint64_t unused)
{
	unsigned char key[KEY_MAX];
	struct slot *s;
	uint32_t other;

	(void)unused;
	if (!take_key(v, key_len, key) || len > VALUE_MAX || len > v->window_size - key_len)
		return 1;
	s = find(key, key_len, 1);
	if (!s)
		return 2;
	other = (s->turn ^ 1) & 1;
	memcpy(s->value[other], (unsigned char *)v->window + key_len, len);
	s->len[other] = len;
	if (s->turn < 2) {
		memcpy(s->key, key, key_len);
		s->key_len = key_len;
	}
	__atomic_store_n(&s->turn, 2 | other, __ATOMIC_RELEASE);
	return 0;
}
TOMBOLO_CALL(0, put);

/* get(key_len): the value's length, the value behind the key in the window; ~0 if the key is not there or the window too small. */
uint64_t get(const struct tombolo_visit *v, uint64_t key_len, uint64_t b, uint64_t c)
{
	unsigned char key[KEY_MAX];
	struct slot *s;
	uint32_t valid;

	(void)b, (void)c;
	if (!take_key(v, key_len, key))
		return ~0ull;
	s = find(key, key_len, 0);
	if (!s)
		return ~0ull;
	valid = s->turn & 1;
	if (s->len[valid] > v->window_size - key_len)
		return ~0ull;
	memcpy((unsigned char *)v->window + key_len, s->value[valid], s->len[valid]);
	return s->len[valid];
}
TOMBOLO_CALL(1, get);

/* forget(key_len): 1 if the key was there. */
uint64_t forget(const struct tombolo_visit *v, uint64_t key_len, uint64_t b, uint64_t c)
{
	unsigned char key[KEY_MAX];
	struct slot *s;

	(void)b, (void)c;
	if (!take_key(v, key_len, key))
		return 0;
	s = find(key, key_len, 0);
	if (!s)
		return 0;
	__atomic_store_n(&s->turn, 1, __ATOMIC_RELEASE);
	return 1;
}
TOMBOLO_CALL(2, forget);

/* nothing(a, b, c): a; what a call costs. */
uint64_t nothing(const struct tombolo_visit *v, uint64_t a, uint64_t b, uint64_t c)
{
	(void)v, (void)b, (void)c;
	return a;
}
TOMBOLO_CALL(3, nothing);

/* ended(): how many visits ended early. */
uint64_t ended(const struct tombolo_visit *v, uint64_t a, uint64_t b, uint64_t c)
{
	(void)a, (void)b, (void)c;
	return v->ended;
}
TOMBOLO_CALL(4, ended);
