// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Zones in a guest: virtio-pmem devices whose first page is a zone header. A zone is found by device path, uuid or
 * name; its header is copied, checked, and only the copy used; then this kernel takes its slot of the member table.
 */
#include "tombolo.h"

#include <linux/file.h>
#include <linux/magic.h>
#include <linux/memremap.h>
#include <linux/mman.h>
#include <linux/vmalloc.h>
#include <linux/slab.h>
#include <linux/uuid.h>

#define TMB_PMEM_DEVICES 256 /* /dev/pmem0 ... looked at */

/* Maps the whole device behind an open zone->dev. */
static int tmb_zone_map(struct tmb_zone *zone, void *holder)
{
	u64 bytes = bdev_nr_bytes(zone->dev.bdev);
	void *addr;
	tmb_pfn pfn;
	long pages;
	int id;

	zone->dax = fs_dax_get_by_bdev(zone->dev.bdev, &zone->dax_start, holder, NULL);
	if (!zone->dax)
		return -EOPNOTSUPP;
	id = dax_read_lock();
	pages = dax_direct_access(zone->dax, PHYS_PFN(zone->dax_start), PHYS_PFN(bytes), DAX_ACCESS, &addr, &pfn);
	dax_read_unlock(id);
	if (pages < 0 || PFN_PHYS((u64)pages) < bytes || !tmb_pfn_of(pfn)) {
		fs_put_dax(zone->dax, holder);
		return pages < 0 ? (int)pages : -EOPNOTSUPP;
	}
	/* A driver that is unbound from the device waits for this reference before it unmaps the memory. */
	zone->pages = tmb_get_pagemap(tmb_pfn_of(pfn));
	if (!zone->pages) {
		fs_put_dax(zone->dax, holder);
		return -ENODEV;
	}
	zone->addr = addr;
	zone->pfn = tmb_pfn_of(pfn);
	zone->size = bytes;
	return 0;
}

static void tmb_zone_unmap(struct tmb_zone *zone, void *holder)
{
	fs_put_dax(zone->dax, holder);
	put_dev_pagemap(zone->pages);
	zone->addr = NULL; /* a caller that undoes all it did asks by this whether to detach the zone */
}

/* Copies the header and checks it. -EINVAL: no zone; -EPROTONOSUPPORT: not one for this module. */
static int tmb_zone_check(struct tmb_zone *zone)
{
	struct tmb_zone_header *h;
	int err = -EINVAL;
	u32 i;

	if (zone->size < TMB_ZONE_MIN)
		return -EINVAL;
	if (tmb_load((u64 *)zone->addr) != TMB_ZONE_MAGIC)
		return -EINVAL;
	h = kmalloc(sizeof(*h), GFP_KERNEL);
	if (!h)
		return -ENOMEM;
	memcpy(h, zone->addr, sizeof(*h));
	/* The compiler must not load the copied fields from the zone again. */
	barrier();
	if (h->magic != TMB_ZONE_MAGIC)
		goto out;
	err = -EPROTONOSUPPORT;
	if (h->version != TMB_ZONE_VERSION || h->incompat)
		goto out;
	err = -EUCLEAN;
	if (h->header_size != sizeof(*h) || h->size > zone->size || h->size < TMB_ZONE_MIN || h->size % TMB_PAGE ||
	    h->n_areas > TMB_MAX_AREAS || h->n_members != TMB_MAX_MEMBERS || h->members_off != sizeof(*h) ||
	    h->member_size != sizeof(struct tmb_member))
		goto out;
	zone->size = h->size;
	memcpy(zone->uuid, h->uuid, sizeof(zone->uuid));
	memcpy(zone->name, h->name, TMB_NAME_LEN);
	zone->name[TMB_NAME_LEN] = 0;
	zone->members = (struct tmb_member *)(zone->addr + h->members_off);
	zone->files_length = zone->sync_length = zone->calls_length = 0;
	for (i = 0; i < h->n_areas; i++) {
		const struct tmb_area *a = &h->areas[i];

		if (a->type != TMB_AREA_FILES && a->type != TMB_AREA_SYNC && a->type != TMB_AREA_CALLS)
			continue;
		if (a->offset % TMB_PAGE || a->length % TMB_PAGE || a->offset < h->members_off ||
		    a->offset > zone->size || a->length > zone->size - a->offset)
			goto out;
		if (a->type == TMB_AREA_FILES && !zone->files_length) {
			zone->files_offset = a->offset;
			zone->files_length = a->length;
		} else if (a->type == TMB_AREA_SYNC && !zone->sync_length) {
			zone->sync_offset = a->offset;
			zone->sync_length = a->length;
		} else if (a->type == TMB_AREA_CALLS && !zone->calls_length) {
			zone->calls_offset = a->offset;
			zone->calls_length = a->length;
		}
	}
	err = zone->files_length || zone->calls_length ? 0 : -ENODATA;
out:
	kfree(h);
	return err;
}

/* Pins all of the memory that the caller has mapped at 'at'. */
static int tmb_pin(struct tmb_zone *zone, unsigned long at, unsigned long count)
{
	unsigned long done = 0;

	while (done < count) {
		int n = min_t(unsigned long, count - done, 1024);

		n = pin_user_pages_fast(at + (done << PAGE_SHIFT), n, FOLL_WRITE | FOLL_LONGTERM, zone->frames + done);
		if (n <= 0 || fatal_signal_pending(current)) {
			if (n > 0)
				done += n;
			unpin_user_pages(zone->frames, done);
			return n < 0 ? n : -EINTR;
		}
		done += n;
		cond_resched();
	}
	return 0;
}

static void tmb_memory_unmap(struct tmb_zone *zone)
{
	vunmap(zone->addr);
	unpin_user_pages(zone->frames, zone->frame_count);
	kvfree(zone->frames);
	zone->frames = NULL;
	zone->addr = NULL;
}

/*
 * Attaches a zone by its memory, a file of tmpfs or hugetlbfs that is open for writing: pins its pages and maps them in one range of kernel addresses. The file
 * may be cut short afterwards: the pages stay. Takes over no reference.
 */
int tmb_zone_attach_memory(struct tmb_zone *zone, struct file *memory)
{
	unsigned long magic = file_inode(memory)->i_sb->s_magic, at, count = i_size_read(file_inode(memory)) >> PAGE_SHIFT;
	int err;

	if ((magic != TMPFS_MAGIC && magic != HUGETLBFS_MAGIC) || !(memory->f_mode & FMODE_READ) || !(memory->f_mode & FMODE_WRITE))
		return -EBADF;
	if (!count || count > totalram_pages())
		return -EINVAL;
	zone->frames = kvmalloc_array(count, sizeof(*zone->frames), GFP_KERNEL);
	if (!zone->frames)
		return -ENOMEM;
	zone->frame_count = count;
	at = vm_mmap(memory, 0, count << PAGE_SHIFT, PROT_READ | PROT_WRITE, MAP_SHARED, 0);
	err = IS_ERR_VALUE(at) ? (int)at : tmb_pin(zone, at, count);
	if (!IS_ERR_VALUE(at))
		vm_munmap(at, count << PAGE_SHIFT);
	if (err)
		goto free;
	zone->memory = memory;
	zone->size = (u64)count << PAGE_SHIFT;
	zone->addr = vmap(zone->frames, count, VM_MAP, PAGE_KERNEL);
	err = zone->addr ? tmb_zone_check(zone) : -ENOMEM;
	if (!err) {
		get_file(memory);
		return 0;
	}
	if (zone->addr)
		vunmap(zone->addr);
	zone->addr = NULL;
	zone->memory = NULL;
	unpin_user_pages(zone->frames, count);
free:
	kvfree(zone->frames);
	zone->frames = NULL;
	return err;
}

/* holder NULL: to look only */
int tmb_zone_attach(struct tmb_zone *zone, const char *path, void *holder)
{
	int err;

	if (holder && !tmb_zone_use())
		return -EBUSY;
	err = tmb_bdev_open(&zone->dev, path, holder != NULL, holder);
	if (err)
		goto unuse;
	err = tmb_zone_map(zone, holder);
	if (err)
		goto close;
	err = tmb_zone_check(zone);
	if (err)
		goto unmap;
	return 0;
unmap:
	tmb_zone_unmap(zone, holder);
close:
	tmb_bdev_close(&zone->dev);
unuse:
	if (holder)
		tmb_zone_unuse();
	return err;
}

void tmb_zone_detach(struct tmb_zone *zone, void *holder)
{
	if (zone->memory) {
		tmb_memory_unmap(zone);
		fput(zone->memory); /* which gives the lock of the slot back */
		return;
	}
	tmb_zone_unmap(zone, holder);
	tmb_bdev_close(&zone->dev);
	if (holder)
		tmb_zone_unuse();
}

/* Finds the zone that 'source' names; *path gets its device (kfree it). Leaves nothing open. */
int tmb_zone_find(const char *source, struct tmb_zone *zone, char **path)
{
	uuid_t uuid;
	bool by_uuid = strlen(source) == UUID_STRING_LEN && !uuid_parse(source, &uuid);
	int err, i, seen = -ENODEV;

	if (source[0] == '/') {
		*path = kstrdup(source, GFP_KERNEL);
		if (!*path)
			return -ENOMEM;
		err = tmb_zone_attach(zone, *path, NULL);
		if (!err)
			tmb_zone_detach(zone, NULL);
		else
			kfree(*path);
		return err;
	}
	for (i = 0; i < TMB_PMEM_DEVICES; i++) {
		*path = kasprintf(GFP_KERNEL, "/dev/pmem%d", i);
		if (!*path)
			return -ENOMEM;
		err = tmb_zone_attach(zone, *path, NULL);
		if (!err) {
			bool match = by_uuid ? !memcmp(zone->uuid, uuid.b, 16) : !strcmp(zone->name, source);

			tmb_zone_detach(zone, NULL);
			if (match)
				return 0;
		} else if (err == -EUCLEAN || err == -EPROTONOSUPPORT) {
			seen = err;
		}
		kfree(*path);
	}
	return seen;
}

/* Returns whether this guest may take a slot: the wanted one, its doorbell's, or any that invites a VM without a doorbell. */
static bool tmb_slot_fits(struct tmb_zone *zone, u32 i, int wanted, u32 doorbell)
{
	struct tmb_member *m = &zone->members[i];

	if (wanted >= 0)
		return i == wanted;
	if (doorbell)
		return tmb_load(&m->doorbell) == doorbell;
	return !tmb_load(&m->doorbell) && tmb_load(&m->role) == TMB_ROLE_VM &&
	       tmb_state(tmb_load(&m->state_epoch)) == TMB_MEMBER_INVITED;
}

/*
 * Takes a slot, which an earlier life of this guest may have left ACTIVE. A guest that mounts read-only, or that has no write grant
 * and may have the zone mapped read-only, stores nothing, not even in its slot: *joined stays false. -ENOSPC: no slot for this
 * guest. -EAGAIN: another member wrote into its slot; the owner mends that within a second.
 */
int tmb_zone_join(struct tmb_zone *zone, int wanted, u32 doorbell, bool read_only, u32 *member, u32 *epoch, bool *writable, bool *joined)
{
	u32 i;

	*joined = false;
	for (i = 0; i < TMB_MAX_MEMBERS; i++) {
		struct tmb_member *m = &zone->members[i];
		u64 was = tmb_load_acquire(&m->state_epoch);

		if (!tmb_slot_fits(zone, i, wanted, doorbell))
			continue;
		if (tmb_state(was) == TMB_MEMBER_EMPTY || tmb_state(was) > TMB_MEMBER_DEAD)
			continue;
		*member = i;
		*epoch = tmb_epoch(was);
		*writable = tmb_load(&m->rights) & TMB_RIGHT_WRITE;
		if (!*writable || read_only)
			return 0;
		if (*epoch >= TMB_EPOCH_END - 1)
			return -EAGAIN;
		++*epoch;
		if (!tmb_cas64(&m->state_epoch, was, tmb_state_epoch(TMB_MEMBER_ACTIVE, *epoch)))
			continue;
		*joined = true;
		return 0;
	}
	return -ENOSPC;
}

void tmb_zone_leave(struct tmb_zone *zone, u32 member, u32 epoch)
{
	/* Fails if the host declared this member dead meanwhile: then the slot belongs to the host again. */
	tmb_cas64(&zone->members[member].state_epoch, tmb_state_epoch(TMB_MEMBER_ACTIVE, epoch),
		  tmb_state_epoch(TMB_MEMBER_INVITED, epoch));
}
