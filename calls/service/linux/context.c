// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The memory of a binding's gate and of its service, as one vCPU sees it: page tables for EPT, the page tables of the guest's kind that both share, and the
 * two pages of code that the module makes, the gate's and the door's (visit.h).
 *
 * A context never changes while it lives, so no CPU has a translation that is out of date. It is freed when no CPU is in it (visit.c).
 */
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "host.h"

#define EPT_READ 1ULL
#define EPT_WRITE 2ULL
#define EPT_EXECUTE 4ULL
#define EPT_WRITE_BACK (6ULL << 3 | 1ULL << 6) /* whatever the guest's PAT says */
#define EPT_ADDRESS 0x000ffffffffff000ULL
/* Present, writable, user, accessed; dirty and large. The tables are read-only to the processor, which need not write what is set already. */
#define GUEST_TABLE 0x27ULL
#define GUEST_LARGE 0xe7ULL

static struct page *tmb_table_of(struct tmb_ept *ept)
{
	struct page *page = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);

	if (page)
		list_add(&page->lru, &ept->tables);
	return page;
}

static int tmb_ept_make(struct tmb_ept *ept)
{
	struct page *root;

	INIT_LIST_HEAD(&ept->tables);
	root = tmb_table_of(ept);
	if (!root)
		return -ENOMEM;
	ept->root = page_address(root);
	ept->pointer = page_to_phys(root) | TMB_VISIT_VALID;
	return 0;
}

static void tmb_ept_free(struct tmb_ept *ept)
{
	struct page *page, *next;

	if (!ept->root)
		return;
	list_for_each_entry_safe(page, next, &ept->tables, lru) {
		list_del(&page->lru);
		__free_page(page);
	}
	ept->root = NULL;
}

static int tmb_ept_map(struct tmb_ept *ept, u64 gpa, struct page *page, u64 access)
{
	u64 *table = ept->root;
	int level;

	for (level = 3; level > 0; level--) {
		u64 *entry = &table[gpa >> (12 + 9 * level) & 511];

		if (!*entry) {
			struct page *below = tmb_table_of(ept);

			if (!below)
				return -ENOMEM;
			*entry = page_to_phys(below) | EPT_READ | EPT_WRITE | EPT_EXECUTE;
		}
		table = phys_to_virt(*entry & EPT_ADDRESS);
	}
	table[gpa >> 12 & 511] = page_to_phys(page) | EPT_WRITE_BACK | access;
	return 0;
}

static int tmb_ept_map_pages(struct tmb_ept *ept, u64 offset, struct page **pages, unsigned long n, u64 access)
{
	unsigned long i;
	int r = 0;

	for (i = 0; i < n && !r; i++)
		r = tmb_ept_map(ept, TMB_GPA_GIB + offset + i * PAGE_SIZE, pages[i], access);
	return r;
}

/* What gate and service have in common: the guest's page tables, and a page of code at the same place. */
static int tmb_map_common(struct tmb_ept *ept, struct tmb_binding *binding, struct page *code)
{
	int r = tmb_ept_make(ept);

	if (!r)
		r = tmb_ept_map(ept, binding->root, binding->level1, EPT_READ);
	if (!r)
		r = tmb_ept_map(ept, TMB_GPA_LEVEL2, binding->level2, EPT_READ);
	if (!r)
		r = tmb_ept_map(ept, TMB_GPA_GIB + TMB_VISIT_GATE, code, EPT_EXECUTE);
	return r;
}

static int tmb_map_service(struct tmb_ept *ept, struct tmb_binding *binding, struct tmb_context *context)
{
	struct tmb_service *service = binding->service;
	int r = tmb_map_common(ept, binding, binding->door);
	unsigned int i;

	for (i = 0; i < service->n_segments && !r; i++) {
		struct tmb_segment *s = &service->segments[i];
		u64 access = EPT_READ | (s->flags & TMB_SERVICE_WRITE ? EPT_WRITE : 0) | (s->flags & TMB_SERVICE_EXECUTE ? EPT_EXECUTE : 0);

		r = tmb_ept_map_pages(ept, TMB_VISIT_SERVICE + s->at, s->pages, s->n, access);
	}
	if (!r)
		r = tmb_ept_map_pages(ept, TMB_VISIT_SHARED, &service->shared, 1, EPT_READ | EPT_WRITE);
	if (!r)
		r = tmb_ept_map_pages(ept, TMB_VISIT_TABLE, &service->table, 1, EPT_READ);
	if (!r)
		r = tmb_ept_map_pages(ept, TMB_VISIT_STACK, context->stack, TMB_STACK_PAGES, EPT_READ | EPT_WRITE);
	if (!r)
		r = tmb_ept_map_pages(ept, TMB_VISIT_FRAME, &context->frame, 1, EPT_READ | EPT_WRITE);
	if (!r)
		r = tmb_ept_map_pages(ept, TMB_VISIT_WINDOW, binding->window, TMB_WINDOW_PAGES, EPT_READ | EPT_WRITE);
	return r;
}

static int tmb_make_context(struct tmb_binding *binding, struct tmb_context *context, struct tmb_visitor *visitor)
{
	static atomic_t ids = ATOMIC_INIT(0);
	struct tmb_visit_frame *frame;
	struct page *list = virt_to_page(visitor->list);
	int i, r;

	for (i = 0; i < TMB_STACK_PAGES; i++) {
		context->stack[i] = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
		if (!context->stack[i])
			return -ENOMEM;
	}
	context->frame = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
	if (!context->frame)
		return -ENOMEM;
	frame = page_address(context->frame);
	frame->window = binding->gate - TMB_VISIT_GATE + TMB_VISIT_WINDOW;
	frame->window_size = TMB_VISIT_WINDOW_SIZE;
	frame->client = binding->generation;
	do
		frame->id = atomic_inc_return(&ids);
	while (!frame->id);
	frame->mxcsr = 0x1f80;
	frame->n_calls = binding->service->n_calls;
	r = tmb_map_common(&context->gate, binding, binding->gate_code);
	if (!r)
		r = tmb_ept_map_pages(&context->gate, TMB_VISIT_LIST, &list, 1, EPT_READ | EPT_WRITE);
	if (!r)
		r = tmb_map_service(&context->service, binding, context);
	return r;
}

static void tmb_free_context(struct tmb_context *context)
{
	int i;

	tmb_ept_free(&context->gate);
	tmb_ept_free(&context->service);
	for (i = 0; i < TMB_STACK_PAGES; i++)
		if (context->stack[i])
			__free_page(context->stack[i]);
	if (context->frame)
		__free_page(context->frame);
}

/* One entry of the first level leads to the second, one entry of which is the GiB; all others lead to where nothing is mapped, so that an access ends the
 * visit as an EPT violation and not as an exception of the guest's. */
static void tmb_write_guest_tables(struct tmb_binding *binding)
{
	u64 *level1 = page_address(binding->level1), *level2 = page_address(binding->level2);
	int i;

	for (i = 0; i < 512; i++) {
		level1[i] = TMB_GPA_HOLE | GUEST_TABLE;
		level2[i] = TMB_GPA_HOLE | GUEST_LARGE;
	}
	level1[binding->gate >> 39 & 511] = TMB_GPA_LEVEL2 | GUEST_TABLE;
	level2[binding->gate >> 30 & 511] = TMB_GPA_GIB | GUEST_LARGE;
}

static void tmb_write_code(struct tmb_binding *binding)
{
	const u8 enter[] = TMB_VISIT_ENTER_CODE((u8)binding->index), leave[] = TMB_VISIT_EXIT_CODE;
	const u8 vmfunc[] = { 0x0f, 0x01, 0xd4 };
	u8 *gate = page_address(binding->gate_code), *door = page_address(binding->door);
	u32 in = TMB_VISIT_ENTER(binding->index), out = TMB_VISIT_EXIT_AT(binding->index);
	u32 own_index = TMB_VISIT_GATE_INDEX + binding->number;
	u32 to_leave = tmb_door_leave - tmb_door;
	s32 jump;

	BUILD_BUG_ON(sizeof(enter) != TMB_VISIT_ENTER_SIZE || sizeof(leave) != TMB_VISIT_EXIT_SIZE);
	memset(gate, 0xcc, PAGE_SIZE);
	memcpy(gate + in, enter, sizeof(enter));
	memcpy(gate + out, leave, sizeof(leave));
	memcpy(door, tmb_door, PAGE_SIZE);
	memcpy(door + out - sizeof(vmfunc), vmfunc, sizeof(vmfunc));
	door[in + sizeof(enter)] = 0xe9; /* jmp to the page's start */
	jump = -(s32)(in + sizeof(enter) + 5);
	memcpy(door + in + sizeof(enter) + 1, &jump, 4);
	memcpy(door + (tmb_door_index - tmb_door), &own_index, 4);
	jump = (s32)(out - sizeof(vmfunc)) - (s32)(to_leave + 4);
	memcpy(door + to_leave, &jump, 4);
}

int tmb_contexts_make(struct tmb_binding *binding)
{
	struct tmb_client *client = binding->client;
	struct page **pages[] = { &binding->level1, &binding->level2, &binding->gate_code, &binding->door };
	unsigned int i;
	int r = 0;

	for (i = 0; i < ARRAY_SIZE(pages); i++) {
		*pages[i] = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
		if (!*pages[i])
			return -ENOMEM;
	}
	tmb_write_guest_tables(binding);
	tmb_write_code(binding);
	binding->contexts = kcalloc(client->n_visitors, sizeof(*binding->contexts), GFP_KERNEL_ACCOUNT);
	if (!binding->contexts)
		return -ENOMEM;
	for (i = 0; i < client->n_visitors && !r; i++)
		r = tmb_make_context(binding, &binding->contexts[i], &client->visitors[i]);
	return r;
}

void tmb_contexts_free(struct tmb_binding *binding)
{
	struct page *pages[] = { binding->level1, binding->level2, binding->gate_code, binding->door };
	unsigned int i;

	for (i = 0; binding->contexts && i < binding->client->n_visitors; i++)
		tmb_free_context(&binding->contexts[i]);
	kfree(binding->contexts);
	for (i = 0; i < ARRAY_SIZE(pages); i++)
		if (pages[i])
			__free_page(pages[i]);
}
