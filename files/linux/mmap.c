// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Mappings are of the zone's own pages, through fs/dax. Before the first page of an inode is mapped, the zone's inode gets this member's mapper bit
 * (tfs_map_ref). A member that unlinks blocks rings every mapper and waits until its bit is cleared. Here a worker then unmaps the inode everywhere,
 * and clears the bit once its pages are not in use. A later access faults again and finds the file as it is then, or SIGBUS.
 *
 * Holes: a shared mapping of a file that is open for writing gets a block at the first access, since programs use it as shared memory and wait for
 * each other at pages that none has stored to. Other mappings may only read, so they must not fill the zone and show zeroes. Their member sets its bit
 * in the inode (tfs_hole_ref), and a member that fills a hole waits until they are taken back. A read-only member can't set the bit; its poll takes
 * its mappings of holes back instead (TMB_POLL_MS).
 */
#include "tombolo.h"

#include <linux/cred.h>
#include <linux/delay.h>
#include <linux/file.h>
#include <linux/iomap.h>
#include <linux/pagemap.h>
#include <linux/sched/signal.h>
#include <linux/sched/task.h>
#include <linux/userfaultfd_k.h>

/* The other reasons belong to other services. */
#define TMB_FILES_PENDING (TMB_PENDING_REVOKE | TMB_PENDING_LOCK | TMB_PENDING_EVENT | TMB_PENDING_MEMBERS)
#define TMB_POLL_MS 50	   /* while something is mapped or watched and a member has no doorbell */
#define TMB_WATCH_MS 500   /* while something is mapped or watched: looks for new members without a doorbell; well below TFS_REVOKE_LIMIT_NS */
#define TMB_GIVE_WAY 50	     /* ms between the revoke of an inode and its next mapping while pages of another one are in use */
#define TMB_FAULT_TRIES 64  /* waits for an inode that another member keeps changing, before the access starts over */
#define TMB_HOLE (~0ul >> 2)   /* in 'runs': a mapped hole */

/* --- faults ------------------------------------------------------------------------------------------------ */

static struct page *tmb_page_of(struct tmb_sb *s, u64 block)
{
	unsigned long frame = (s->zone.files_offset >> PAGE_SHIFT) + block;

	return s->zone.frames ? s->zone.frames[frame] : pfn_to_page(s->zone.pfn + frame);
}

/* Returns the entry of 'runs' that has this page, or NULL; its first page is stored at *first. */
static void *tmb_run_with(struct tmb_inode *ti, pgoff_t index, pgoff_t *first)
{
	void *entry = xa_load(&ti->runs, index);

	*first = index;
	if (entry)
		return entry;
	*first = round_down(index, HPAGE_PMD_NR);
	entry = xa_load(&ti->runs, *first);
	return entry && xa_to_value(entry) & 1 ? entry : NULL;
}

/* Stores in 'runs' what is about to be mapped at 'index'; block 0: a hole. -EAGAIN: an older block is still mapped here, and must be unmapped first. */
static int tmb_note_mapped(struct inode *inode, pgoff_t index, u64 block, unsigned long pages)
{
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	struct tmb_inode *ti = tmb_i(inode);
	unsigned long value = block ? block << 1 | (pages > 1) : TMB_HOLE << 1, i;
	pgoff_t first;
	void *old, *now;

	/* In an undamaged zone a block belongs to one place of one file. */
	for (i = 0; block && !s->zone.frames && i < pages; i++) {
		pgoff_t at;
		struct address_space *of = tmb_page_mapping(tmb_page_of(s, block + i), &at);

		if (of && (of != tmb_pages(inode) || at != index + i)) {
			tfs_os_damage(&s->fs, "a block is mapped at two places", inode->i_ino, block + i);
			return -EUCLEAN;
		}
	}
	old = tmb_run_with(ti, index, &first);
	if (old && xa_to_value(old) >> 1 != TMB_HOLE) {
		if ((xa_to_value(old) >> 1) + (index - first) != block)
			return -EAGAIN;
		if (xa_to_value(old) & 1 || pages == 1)
			return 0;
	} else if (old && !block) {
		return 0;
	}
	/* Another fault of this page has invalidate_lock shared, too, and may have found another block. */
	old = first == index ? old : NULL;
	now = xa_cmpxchg(&ti->runs, index, old, xa_mk_value(value), GFP_NOFS);
	if (xa_is_err(now))
		return xa_err(now);
	return now == old || now == xa_mk_value(value) ? 0 : -EAGAIN;
}

/* Gives dax the blocks to map at pos. -EAGAIN: the file has changed, look again without the lock. */
static int tmb_iomap_begin(struct inode *inode, loff_t pos, loff_t length, unsigned int flags, struct iomap *iomap,
			   struct iomap *srcmap)
{
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	struct tmb_inode *ti = tmb_i(inode);
	bool huge = length > PAGE_SIZE, told = smp_load_acquire(&ti->told_holes);
	pgoff_t index = pos >> PAGE_SHIFT;
	unsigned long pages = huge ? HPAGE_PMD_NR : 1;
	struct tfs_run run;
	int err;

	err = tfs_map(&s->fs, tmb_h(inode), index, pages, &run);
	if (!err && !run.block && !told) {
		WRITE_ONCE(ti->shows_holes, true);
		err = tfs_hole_ref(&s->fs, tmb_h(inode));
		smp_mb(); /* a member that fills the hole sees both bits, or its block is seen here */
		if (!err) {
			smp_store_release(&ti->told_holes, true);
			err = tfs_map(&s->fs, tmb_h(inode), index, pages, &run);
		}
	}
	if (err)
		return err;
	iomap->offset = pos;
	iomap->length = (u64)pages << PAGE_SHIFT;
	iomap->flags = 0;
	iomap->dax_dev = s->zone.dax;
	iomap->bdev = s->zone.dev.bdev;
	if (!run.block) {
		if (flags & IOMAP_WRITE || huge)
			return -EAGAIN;
		iomap->type = IOMAP_HOLE;
		iomap->addr = IOMAP_NULL_ADDR;
	} else {
		if (run.count < pages)
			return -EAGAIN;
		iomap->type = IOMAP_MAPPED;
		iomap->addr = s->zone.dax_start + s->zone.files_offset + (run.block << TFS_BLOCK_SHIFT);
	}
	return tmb_note_mapped(inode, index, run.block, pages);
}

/* As tmb_iomap_begin(), for holes only. */
static int tmb_iomap_begin_hole(struct inode *inode, loff_t pos, loff_t length, unsigned int flags, struct iomap *iomap,
				struct iomap *srcmap)
{
	int err = tmb_iomap_begin(inode, pos, length, flags, iomap, srcmap);

	return !err && iomap->type != IOMAP_HOLE ? -EAGAIN : err;
}

static const struct iomap_ops tmb_iomap_ops = {
	.iomap_begin = tmb_iomap_begin,
};

static const struct iomap_ops tmb_iomap_hole_ops = {
	.iomap_begin = tmb_iomap_begin_hole,
};

/* Sets this member's mapper bit, with invalidate_lock held shared. */
static int tmb_map_reference(struct inode *inode)
{
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	struct tmb_inode *ti = tmb_i(inode);
	int err = 0;

	if (READ_ONCE(ti->mapped))
		return 0;
	mutex_lock(&ti->map_lock);
	if (!ti->mapped) {
		/* Read before the bit is set: a later change then shows. */
		ti->map_seq = tfs_map_seq(&s->fs, inode->i_ino);
		err = tfs_map_ref(&s->fs, tmb_h(inode));
		if (!err) {
			spin_lock(&s->mapped_lock);
			list_add(&ti->mapped_link, &s->mapped);
			spin_unlock(&s->mapped_lock);
			WRITE_ONCE(ti->mapped, true);
			queue_delayed_work(s->work_queue, &s->poll, msecs_to_jiffies(TMB_POLL_MS));
		}
	}
	mutex_unlock(&ti->map_lock);
	return err;
}

/*
 * While pages of some inode are in use, this member ends no round (tfs_revoked), and a member that waits for it to let go of another inode sees that by
 * the mapper bit alone. So the bit stays clear for longer than the pauses between the other member's looks.
 */
static int tmb_give_way(struct inode *inode)
{
	unsigned long until = READ_ONCE(tmb_i(inode)->revoked_at) + msecs_to_jiffies(TMB_GIVE_WAY), now = jiffies;

	if (!READ_ONCE(tmb_sb(inode->i_sb)->keeping) || READ_ONCE(tmb_i(inode)->mapped) || !time_before(now, until))
		return 0;
	schedule_timeout_killable(until - now);
	return fatal_signal_pending(current) ? -EINTR : 0;
}

static vm_fault_t tmb_fault_error(int err)
{
	switch (err) {
	case -ENOMEM:
		return VM_FAULT_OOM;
	case -EAGAIN:
		return VM_FAULT_NOPAGE; /* the access faults again */
	default:
		return VM_FAULT_SIGBUS;
	}
}

/* Allocates at a hole. Takes the core's lock, so the caller must not hold invalidate_lock. */
static int tmb_fill_hole(struct inode *inode, pgoff_t index)
{
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	struct tmb_inode *ti = tmb_i(inode);
	struct tfs_run run;
	int tries, err = tfs_map(&s->fs, tmb_h(inode), index, 1, &run);

	if (err || run.block || s->fs.read_only)
		return err;
	if (mutex_lock_killable(&ti->fault_lock))
		return -EINTR;
	for (tries = 0; tries < TMB_FAULT_TRIES; tries++) {
		err = tfs_fault_block(&s->fs, tmb_h(inode), index, 1, &run);
		if (err == -EAGAIN)
			err = tfs_wait_inode(&s->fs, tmb_h(inode));
		else
			break;
		if (err)
			break;
		err = -EAGAIN;
	}
	mutex_unlock(&ti->fault_lock);
	if (!err)
		tmb_holes_filled(inode, (loff_t)index << PAGE_SHIFT, PAGE_SIZE);
	return err;
}

#if TMB_HAS_DAX_REFERENCES
/*
 * Takes fs/dax's entries of pages in use out. By itself, fs/dax would split the folio of a huge page under its users, and warns of a small one. So the
 * module keeps the entries in 'aside', and gives them back when no page of the inode is mapped or in use (tmb_end_aside).
 */
static int tmb_set_aside(struct inode *inode, pgoff_t first, pgoff_t last, u64 block)
{
	struct address_space *pages = tmb_pages(inode);
	unsigned int order;
	pgoff_t i;

	for (i = first; i <= last; i += 1ul << order) {
		void *entry = xa_load(&pages->i_pages, i);
		int err;

		order = xa_get_order(&pages->i_pages, i);
		if (!entry)
			continue;
		err = xa_err(xa_store(&tmb_i(inode)->aside, block + (i - first), entry, GFP_NOFS));
		if (err)
			return err;
		xa_lock_irq(&pages->i_pages);
		__xa_erase(&pages->i_pages, i);
		pages->nrpages -= 1ul << order;
		xa_unlock_irq(&pages->i_pages);
	}
	return 0;
}

/* Gives fs/dax the entries back that were set aside, one after another, to take them out itself. Nothing of the inode is mapped or in use. */
static void tmb_end_aside(struct inode *inode)
{
	struct address_space *pages = tmb_pages(inode);
	struct tmb_inode *ti = tmb_i(inode);
	unsigned long block;
	void *entry;

	xa_for_each(&ti->aside, block, entry) {
		struct folio *folio = page_folio(tmb_page_of(tmb_sb(inode->i_sb), block));
		XA_STATE_ORDER(xas, &pages->i_pages, folio->index, folio_order(folio));

		do {
			xas_lock_irq(&xas);
			xas_store(&xas, entry);
			if (!xas_error(&xas))
				pages->nrpages += folio_nr_pages(folio);
			xas_unlock_irq(&xas);
		} while (xas_nomem(&xas, GFP_NOFS | __GFP_NOFAIL));
		tmb_drop_pages(pages);
	}
	xa_destroy(&ti->aside);
}

/* Returns the page of a huge page set aside that has the file's present block at 'index', or NULL. */
static struct page *tmb_page_aside(struct inode *inode, pgoff_t index)
{
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	struct tfs_run run;
	struct page *page;

	if (xa_empty(&tmb_i(inode)->aside) || tfs_map(&s->fs, tmb_h(inode), index, 1, &run) || !run.block)
		return NULL;
	page = tmb_page_of(s, run.block);
	return xa_load(&tmb_i(inode)->aside, run.block - folio_page_idx(page_folio(page), page)) ? page : NULL;
}

/* Maps such a page, as fs/dax maps others. */
static vm_fault_t tmb_aside_fault(struct vm_fault *vmf, struct page *page, bool write, int *err)
{
	struct inode *inode = file_inode(vmf->vma->vm_file);
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	vm_fault_t ret;

	if (vmf->pgoff >= DIV_ROUND_UP((u64)i_size_read(inode), PAGE_SIZE)) {
		*err = -EFAULT;
		return VM_FAULT_SIGBUS;
	}
	*err = tmb_note_mapped(inode, vmf->pgoff, page_to_pfn(page) - s->zone.pfn - (s->zone.files_offset >> PAGE_SHIFT), 1);
	if (*err)
		return tmb_fault_error(*err);
	folio_ref_inc(page_folio(page));
	if (vmf->cow_page) {
		vmf->page = page; /* the caller copies it, and drops the reference */
		return 0;
	}
	ret = vmf_insert_page_mkwrite(vmf, page, write);
	folio_put(page_folio(page));
	return ret;
}
#else
/* fs/dax takes an entry out while its page is in use if it is clean. Nobody writes it back, so its marks tell nothing. */
static int tmb_set_aside(struct inode *inode, pgoff_t first, pgoff_t last, u64 block)
{
	struct address_space *pages = tmb_pages(inode);
	pgoff_t i;

	for (i = first; i <= last; i++) {
		xa_clear_mark(&pages->i_pages, i, PAGECACHE_TAG_DIRTY);
		xa_clear_mark(&pages->i_pages, i, PAGECACHE_TAG_TOWRITE);
	}
	return invalidate_inode_pages2_range(pages, first, last);
}

static void tmb_end_aside(struct inode *inode)
{
}

static struct page *tmb_page_aside(struct inode *inode, pgoff_t index)
{
	return NULL;
}

static vm_fault_t tmb_aside_fault(struct vm_fault *vmf, struct page *page, bool write, int *err)
{
	return VM_FAULT_SIGBUS;
}
#endif

/*
 * Lets another block be mapped at 'index' where the file has one now, though pages of the older block are in use: that block is kept in 'displaced' until
 * they are not. The caller has unmapped the inode everywhere and holds invalidate_lock.
 */
static int tmb_displace(struct inode *inode, pgoff_t index)
{
	struct tmb_inode *ti = tmb_i(inode);
	pgoff_t first;
	void *entry = tmb_run_with(ti, index, &first), *aside;
	struct tfs_run run;
	u64 block;
	int err;

	if (!entry || xa_to_value(entry) >> 1 == TMB_HOLE)
		return 0;
	block = xa_to_value(entry) >> 1;
	err = tfs_map(tmb_fs(inode), tmb_h(inode), index, 1, &run);
	if (err || run.block == block + (index - first))
		return err == -EAGAIN ? 0 : err;
	/* A huge page that was set aside before stays: this may be its first small page alone, and another one may be in use. */
	aside = xa_load(&ti->displaced, block);
	if (!aside || !(xa_to_value(aside) & 1))
		err = xa_err(xa_store(&ti->displaced, block, entry, GFP_NOFS));
	if (err)
		return err;
	xa_erase(&ti->runs, first);
	return tmb_set_aside(inode, first, first + (xa_to_value(entry) & 1 ? HPAGE_PMD_NR : 1) - 1, block);
}

/* Unmaps all of the inode, so that the block that the file has at 'index' now can be mapped. */
static int tmb_unmap_stale(struct inode *inode, pgoff_t index)
{
	int err = down_write_killable(&inode->i_mapping->invalidate_lock);

	if (err)
		return err;
	err = tmb_revoke_locked(inode);
	if (err == -EBUSY)
		err = tmb_displace(inode, index);
	filemap_invalidate_unlock(inode->i_mapping);
	return err;
}

/*
 * Before 6.15, a page that fs/dax maps is none of those that the kernel's memory management knows (vm_normal_page). If such a page of a private mapping
 * is then written to, the kernel copies it by the address where it is mapped, in the address space of the process that writes: a debugger's, of whose
 * memory the debugged process would get a copy. So a private mapping gets the block's page as from a page cache, with a reference. While the page is given
 * and not yet mapped, the reference keeps a revoke from going on. Returns the page, or NULL: a hole, or *err is set.
 */
static struct page *tmb_private_page(struct inode *inode, pgoff_t index, int *err)
{
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	struct tfs_run run;
	struct page *page;

	if (index >= DIV_ROUND_UP((u64)i_size_read(inode), PAGE_SIZE)) {
		*err = -EFAULT;
		return NULL;
	}
	*err = tfs_map(&s->fs, tmb_h(inode), index, 1, &run);
	if (!*err && run.block)
		*err = tmb_note_mapped(inode, index, run.block, 1);
	if (*err || !run.block)
		return NULL;
	page = tmb_page_of(s, run.block);
	get_page(page);
	return page;
}

/*
 * Maps a page of a zone that is attached by its memory. The entry is special: it takes no reference, so to unmap it is enough to take the block back. The
 * kernel gives no such page to direct I/O, to futexes shared by processes or to debuggers (EFAULT).
 */
static vm_fault_t tmb_memory_fault(struct vm_fault *vmf, int *err)
{
	struct vm_area_struct *vma = vmf->vma;
	struct inode *inode = file_inode(vma->vm_file);
	bool write = vmf->flags & FAULT_FLAG_WRITE && vma->vm_flags & VM_SHARED;
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	struct iomap at = {};
	struct page *page;
	unsigned long pfn;

	if (vmf->pgoff >= DIV_ROUND_UP((u64)i_size_read(inode), PAGE_SIZE)) {
		*err = -EFAULT;
		return VM_FAULT_SIGBUS;
	}
	*err = tmb_iomap_begin(inode, (loff_t)vmf->pgoff << PAGE_SHIFT, PAGE_SIZE, write ? IOMAP_WRITE : 0, &at, NULL);
	if (*err)
		return tmb_fault_error(*err);
	page = at.type == IOMAP_HOLE ? ZERO_PAGE(vmf->address) : tmb_page_of(s, (at.addr - s->zone.files_offset) >> TFS_BLOCK_SHIFT);
	pfn = page_to_pfn(page);
	if (write && vmf->flags & FAULT_FLAG_ORIG_PTE_VALID && pte_present(vmf->orig_pte)) {
		if (pte_pfn(vmf->orig_pte) == pfn)
			return 0; /* the kernel makes the entry writable if it is still the same */
		*err = -EAGAIN; /* zeroes of a hole, which are everybody's, or an older block */
		return VM_FAULT_NOPAGE;
	}
	return vmf_insert_mixed(vma, vmf->address, tmb_pfn_from(pfn));
}

static vm_fault_t tmb_fault_order(struct vm_fault *vmf, tmb_order order)
{
	struct vm_area_struct *vma = vmf->vma;
	struct inode *inode = file_inode(vma->vm_file);
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	bool write = vmf->flags & FAULT_FLAG_WRITE && vma->vm_flags & VM_SHARED, again = false;
	/* Huge pages need no such care: a write splits them, and the small page is mapped anew. */
	bool private = !TMB_HAS_DAX_REFERENCES && !s->zone.frames && order == TMB_ORDER_PTE && (vma->vm_flags & (VM_SHARED | VM_MAYWRITE)) == VM_MAYWRITE;
	struct page *page = NULL, *aside;
	vm_fault_t ret = VM_FAULT_NOPAGE;
	int err = 0;

	/* fs/dax maps nothing over a marker of userfaultfd(2): a system call that copies would fault here for good, and no signal would end it. */
	if (vmf->flags & FAULT_FLAG_ORIG_PTE_VALID && tmb_is_uffd_marker(vmf->orig_pte))
		return VM_FAULT_SIGBUS;
	if (order != TMB_ORDER_PTE) {
		struct tfs_run run;
		pgoff_t start = vmf->pgoff & ~(pgoff_t)(HPAGE_PMD_NR - 1);
		unsigned long pfn;

		if (order != TMB_ORDER_PMD || s->zone.frames)
			return VM_FAULT_FALLBACK;
		if (tfs_map(&s->fs, tmb_h(inode), start, HPAGE_PMD_NR, &run) || !run.block || run.count < HPAGE_PMD_NR)
			return VM_FAULT_FALLBACK;
		pfn = s->zone.pfn + (s->zone.files_offset >> PAGE_SHIFT) + run.block;
		if (pfn & (HPAGE_PMD_NR - 1))
			return VM_FAULT_FALLBACK;
	}
	if (write) {
		sb_start_pagefault(inode->i_sb);
		file_update_time(vma->vm_file);
	}
	if (order == TMB_ORDER_PTE && vma->vm_flags & VM_SHARED)
		err = tmb_fill_hole(inode, vmf->pgoff);
	/* Without room for a block, a hole is read as zeroes. */
	if (!write && (err == -ENOSPC || err == -EDQUOT))
		err = 0;
	if (!err)
		err = tmb_give_way(inode);
	/* A removal has the lock while it waits for other members' mappings. */
	if (!err)
		err = down_read_killable(&inode->i_mapping->invalidate_lock);
	if (!err) {
		err = tmb_map_reference(inode);
		if (!err) {
			tmb_refresh_size(inode);
			if (private)
				page = tmb_private_page(inode, vmf->pgoff, &err);
			aside = order == TMB_ORDER_PTE && !err && !page ? tmb_page_aside(inode, vmf->pgoff) : NULL;
			if (aside)
				ret = tmb_aside_fault(vmf, aside, write, &err);
			else if (!err && s->zone.frames)
				ret = tmb_memory_fault(vmf, &err);
			else if (!err && !page)
				ret = dax_iomap_fault(vmf, order, NULL, &err, private ? &tmb_iomap_hole_ops : &tmb_iomap_ops);
			else if (err)
				ret = tmb_fault_error(err);
			again = err == -EAGAIN;
			err = 0;
		}
		filemap_invalidate_unlock_shared(inode->i_mapping);
	}
	if (again) {
		/* The file changed during the fault, or an older block is still mapped here: unmap it now. */
		err = tmb_unmap_stale(inode, order == TMB_ORDER_PTE ? vmf->pgoff : round_down(vmf->pgoff, HPAGE_PMD_NR));
		ret = err ? tmb_fault_error(err) : VM_FAULT_NOPAGE;
		err = 0;
	}
	if (err == -EAGAIN && tfs_frozen(&s->fs))
		tfs_os_wait(&s->fs, 100);
	if (err)
		ret = tmb_fault_error(err);
	if (write)
		sb_end_pagefault(inode->i_sb);
	if (page) {
		vmf->page = page; /* which the caller locks and maps, or copies */
		return 0;
	}
	return ret;
}

static vm_fault_t tmb_fault(struct vm_fault *vmf)
{
	return tmb_fault_order(vmf, TMB_ORDER_PTE);
}

static vm_fault_t tmb_huge_fault(struct vm_fault *vmf, tmb_order order)
{
	return tmb_fault_order(vmf, order);
}

static const struct vm_operations_struct tmb_vm_ops = {
	.fault = tmb_fault,
	.huge_fault = tmb_huge_fault,
	.page_mkwrite = tmb_fault,
	.pfn_mkwrite = tmb_fault,
};

#if TMB_PAGES_APART
static const struct cred *tmb_kernel_cred;

void tmb_pages_init_once(struct inode *inode)
{
	address_space_init_once(&tmb_i(inode)->pages);
}

void tmb_pages_init(struct inode *inode)
{
	struct address_space *pages = &tmb_i(inode)->pages;

	pages->host = inode;
	pages->a_ops = &tmb_aops;
	pages->flags = 0;
	pages->wb_err = 0;
	atomic_set(&pages->i_mmap_writable, 0);
	mapping_set_gfp_mask(pages, GFP_HIGHUSER_MOVABLE);
	init_rwsem(&pages->invalidate_lock);
}

/* Such a file tells no watcher of its open and its close: they are the mappings'. */
bool tmb_opened_for_mapping(const struct file *file)
{
	return file->f_mapping == tmb_pages(file_inode(file)) && !(file->f_mode & FMODE_BACKING);
}

/* Called by each open: the kernel's own opens, those of files for mappings, tell no watcher. */
void tmb_hush(struct file *file)
{
	if (file->f_cred == tmb_kernel_cred)
		tmb_set_nonotify(file);
}

/*
 * Returns the file that all mappings by this one have. No descriptor has it, and its mapping has the inode's mapped pages. It is opened at the first mmap
 * and kept until this file's release, so that who maps a file often takes no more of the system's open files. The kernel opens it: security modules have
 * checked the program's open, and one that decides by names would refuse the file once it is renamed.
 */
static struct file *tmb_file_of_mappings(struct file *file)
{
	int flags = (file->f_flags & O_ACCMODE) | O_LARGEFILE | TMB_OPEN_NONOTIFY;
	struct file *own = READ_ONCE(file->private_data), *other;

	if (own)
		return own;
	own = dentry_open(&file->f_path, flags, tmb_kernel_cred);
	if (IS_ERR(own))
		return own;
	own->f_mapping = tmb_pages(file_inode(file));
	other = cmpxchg(&file->private_data, NULL, own);
	if (!other)
		return own;
	fput(own);
	return other;
}

static int tmb_set_pages(struct file *file, struct vm_area_struct *vma)
{
	struct file *own;

	if (tmb_opened_for_mapping(file)) /* remap_file_pages(2) */
		return 0;
	/* No descriptor has overlayfs's own file of a lower file, either, and /proc/PID/maps shows the overlay's path by it. */
	if (file->f_mode & FMODE_BACKING) {
		WRITE_ONCE(file->f_mapping, tmb_pages(file_inode(file)));
		return 0;
	}
	own = tmb_file_of_mappings(file);
	if (IS_ERR(own))
		return PTR_ERR(own);
	vma_set_file(vma, own);
	return 0;
}

void tmb_release_mappings(struct file *file)
{
	if (file->private_data)
		fput(file->private_data);
}

static int tmb_pages_start(void)
{
	tmb_kernel_cred = prepare_kernel_cred(&init_task);
	return tmb_kernel_cred ? 0 : -ENOMEM;
}

static void tmb_pages_stop(void)
{
	put_cred(tmb_kernel_cred);
}
#else
void tmb_pages_init_once(struct inode *inode)
{
}

void tmb_pages_init(struct inode *inode)
{
}

bool tmb_opened_for_mapping(const struct file *file)
{
	return false;
}

void tmb_hush(struct file *file)
{
}

static int tmb_set_pages(struct file *file, struct vm_area_struct *vma)
{
	return 0;
}

void tmb_release_mappings(struct file *file)
{
}

static int tmb_pages_start(void)
{
	return 0;
}

static void tmb_pages_stop(void)
{
}
#endif

int tmb_mmap(struct file *file, struct vm_area_struct *vma)
{
	int err = tmb_refresh(file_inode(file));

	if (!err)
		err = tmb_set_pages(file, vma);
	if (err)
		return err;
	file_accessed(file);
	vma->vm_ops = &tmb_vm_ops;
	if (tmb_sb(file_inode(file)->i_sb)->zone.frames) {
		/*
		 * VM_IO: the kernel gives its pages to nobody, debuggers included. A debugger's write into a private mapping would copy by the address,
		 * which is another one's in the debugger.
		 */
		vm_flags_set(vma, VM_MIXEDMAP | VM_IO);
		return 0;
	}
	vm_flags_set(vma, VM_HUGEPAGE);
	return 0;
}

const struct address_space_operations tmb_aops = {
	.direct_IO = noop_direct_IO, /* allows O_DIRECT */
	.dirty_folio = noop_dirty_folio,
};

/* --- taking mappings back -------------------------------------------------------------------------------------- */

static bool tmb_pinned_at(struct tmb_sb *s, unsigned long entry)
{
	unsigned long i, pages = entry & 1 ? HPAGE_PMD_NR : 1;
	unsigned long pfn = s->zone.pfn + (s->zone.files_offset >> PAGE_SHIFT) + (entry >> 1);

	if (entry >> 1 == TMB_HOLE || s->zone.frames)
		return false;
	for (i = 0; i < pages; i++)
		if (tmb_page_busy(pfn_to_page(pfn + i)))
			return true;
	return false;
}

static bool tmb_any_pinned(struct tmb_sb *s, struct tmb_inode *ti)
{
	void *entry = xa_load(&ti->runs, ti->pinned_at);
	unsigned long index;

	if (entry && tmb_pinned_at(s, xa_to_value(entry)))
		return true;
	xa_for_each(&ti->displaced, index, entry)
		if (tmb_pinned_at(s, xa_to_value(entry)))
			return true;
	xa_for_each(&ti->runs, index, entry)
		if (tmb_pinned_at(s, xa_to_value(entry))) {
			ti->pinned_at = index;
			return true;
		}
	return false;
}

/*
 * A page in a pipe, or under direct I/O, outlives its mapping and its file. Its block must not become another file's, so the inode stays in the cache
 * and in 's->mapped', and the super block stays though nothing is mounted any more. The worker checks whether the pages are idle. Then another thread
 * drops these references, since that may end the super block, which waits for the worker.
 */
struct tmb_linger {
	struct work_struct work;
	struct inode *inode;
};

static struct workqueue_struct *tmb_put_queue;

/* The inode's pages are no longer in use: ends its references to itself. The caller holds invalidate_lock. */
static void tmb_end_lingering(struct tmb_sb *s, struct tmb_inode *ti)
{
	if (!ti->lingers)
		return;
	queue_work(tmb_put_queue, &ti->lingers->work);
	ti->lingers = NULL;
	atomic_dec(&s->lingering);
}

/*
 * Unmaps all of an inode and clears the mapper bit, without waiting. -EBUSY: its pages are in use (a pipe, direct I/O of another file system); then
 * the bit and the blocks stay. The caller holds invalidate_lock.
 */
int tmb_revoke_locked(struct inode *inode)
{
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	struct tmb_inode *ti = tmb_i(inode);
	int err;

	if (!ti->mapped)
		return 0;
	unmap_mapping_range(tmb_pages(inode), 0, 0, 0);
	if (tmb_any_pinned(s, ti))
		return -EBUSY;
	tmb_drop_pages(tmb_pages(inode));
	tmb_end_aside(inode);
	xa_destroy(&ti->runs);
	xa_destroy(&ti->displaced);
	spin_lock(&s->mapped_lock);
	list_del_init(&ti->mapped_link);
	spin_unlock(&s->mapped_lock);
	WRITE_ONCE(ti->mapped, false);
	WRITE_ONCE(ti->revoked_at, jiffies);
	ti->shows_holes = ti->told_holes = false;
	tmb_end_lingering(s, ti);
	err = tfs_unmap_ref(&s->fs, tmb_h(inode));
	return err == -ESTALE ? 0 : err;
}

/* Called after holes were filled: takes back the zeroes that this kernel maps there; length 0: in all of the file. The core has told other members. */
void tmb_holes_filled(struct inode *inode, loff_t pos, loff_t length)
{
	smp_mb(); /* pairs with tmb_iomap_begin() */
	if (!READ_ONCE(tmb_i(inode)->shows_holes))
		return;
	/* A fault that found the hole maps its zeroes before this; a later one finds the block. */
	filemap_invalidate_lock(inode->i_mapping);
	unmap_mapping_range(tmb_pages(inode), round_down(pos, PAGE_SIZE), round_up(length + (pos & ~PAGE_MASK), PAGE_SIZE), 0);
	filemap_invalidate_unlock(inode->i_mapping);
}

/* --- files that are closed while their pages are in use -------------------------------------------------------- */

static void tmb_stop_lingering(struct work_struct *work)
{
	struct tmb_linger *l = container_of(work, struct tmb_linger, work);
	struct super_block *sb = l->inode->i_sb;

	tmb_unreference(l->inode);
	iput(l->inode);
	deactivate_super(sb);
	kfree(l);
}

int tmb_mappings_init(void)
{
	int err = tmb_pages_start();

	if (err)
		return err;
	tmb_put_queue = alloc_workqueue("tombolo-put", WQ_UNBOUND, 0);
	if (tmb_put_queue)
		return 0;
	tmb_pages_stop();
	return -ENOMEM;
}

void tmb_mappings_exit(void)
{
	destroy_workqueue(tmb_put_queue);
	tmb_pages_stop();
}

/* Called after the last close. A mapping has its file open, so now there is none. */
void tmb_mappings_close(struct inode *inode)
{
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	struct tmb_inode *ti = tmb_i(inode);

	if (!READ_ONCE(ti->mapped))
		return;
	filemap_invalidate_lock(inode->i_mapping);
	if (!READ_ONCE(ti->opens) && tmb_revoke_locked(inode) == -EBUSY && !ti->lingers) {
		struct tmb_linger *l = kmalloc(sizeof(*l), GFP_NOFS | __GFP_NOFAIL);

		INIT_WORK(&l->work, tmb_stop_lingering);
		l->inode = inode;
		ihold(inode);
		atomic_inc(&inode->i_sb->s_active);
		ti->lingers = l;
		atomic_inc(&s->lingering);
		mod_delayed_work(s->work_queue, &s->poll, msecs_to_jiffies(TMB_POLL_MS));
	}
	filemap_invalidate_unlock(inode->i_mapping);
}

/* --- what the worker looks after ------------------------------------------------------------------------------- */

static bool tmb_has_holes(struct tmb_inode *ti)
{
	unsigned long index;
	void *entry;

	xa_for_each(&ti->runs, index, entry)
		if (xa_to_value(entry) >> 1 == TMB_HOLE)
			return true;
	return false;
}

/* Returns a mapped inode that this round has not seen; the caller puts it. */
static struct inode *tmb_next_mapped(struct tmb_sb *s, struct list_head *seen)
{
	struct tmb_inode *ti, *next;
	struct inode *inode = NULL;

	spin_lock(&s->mapped_lock);
	list_for_each_entry_safe(ti, next, &s->mapped, mapped_link) {
		list_move(&ti->mapped_link, seen);
		inode = igrab(&ti->vfs);
		if (inode)
			break;
	}
	spin_unlock(&s->mapped_lock);
	return inode;
}

/* Returns whether there is a member without a doorbell, like a mount on the host, which changes files and can't ring. */
static bool tmb_someone_cannot_ring(struct tmb_sb *s)
{
	u32 i;

	for (i = 0; i < TMB_MAX_MEMBERS; i++) {
		struct tmb_member *m = &s->zone.members[i];

		if (tmb_state(tmb_load(&m->state_epoch)) == TMB_MEMBER_ACTIVE && !tmb_load(&m->doorbell) &&
		    tmb_load(&m->rights) & TMB_RIGHT_WRITE)
			return true;
	}
	return false;
}

static void tmb_look(struct work_struct *work)
{
	struct tmb_sb *s = container_of(to_delayed_work(work), struct tmb_sb, poll);
	struct tmb_member *me = &s->zone.members[s->fs.member];
	/* This member was declared dead and lives, as after QEMU has loaded a saved state. No other member waits for its mappings, which may show blocks of
	 * other files. */
	bool lingering = atomic_read(&s->lingering), expelled = tfs_expelled(&s->fs);
	LIST_HEAD(seen);
	struct inode *inode;
	u64 pending = 0;
	bool again, busy = false, more = false;

	/* A read-only member may be unable to, and compares its files' sequence numbers. */
	if (!s->fs.read_only && !expelled && tmb_load(&me->pending))
		pending = tmb_fetch_and(&me->pending, ~TMB_FILES_PENDING) & TMB_FILES_PENDING;
	if (pending & TMB_PENDING_MEMBERS)
		queue_work(s->lock_queue, &s->recovery);
	if (pending & TMB_PENDING_EVENT)
		more = tmb_changes_hear(s);
	if (pending & TMB_PENDING_REVOKE)
		tfs_revoke(&s->fs);
	if (pending & TMB_PENDING_REVOKE || s->fs.read_only || lingering || expelled) {
		while ((inode = tmb_next_mapped(s, &seen))) {
			struct tmb_inode *ti = tmb_i(inode);
			bool stale = expelled || tfs_map_seq(&s->fs, inode->i_ino) != ti->map_seq || (s->fs.read_only && tmb_has_holes(ti));

			if (stale || READ_ONCE(ti->lingers)) {
				filemap_invalidate_lock(inode->i_mapping);
				if ((stale || !READ_ONCE(ti->opens)) && tmb_revoke_locked(inode) == -EBUSY)
					busy |= stale;
				else if (READ_ONCE(ti->opens))
					tmb_end_lingering(s, ti); /* its next close does it */
				filemap_invalidate_unlock(inode->i_mapping);
			}
			iput(inode);
			cond_resched();
		}
		spin_lock(&s->mapped_lock);
		list_splice(&seen, &s->mapped);
		spin_unlock(&s->mapped_lock);
		WRITE_ONCE(s->keeping, busy);
	}
	if (busy && !expelled) {
		tmb_fetch_or(&me->pending, TMB_PENDING_REVOKE);
	} else if (pending & TMB_PENDING_REVOKE) {
		busy = tfs_revoked(&s->fs);
	}
	spin_lock(&s->mapped_lock);
	again = busy || !list_empty(&s->mapped) || READ_ONCE(s->hearing);
	spin_unlock(&s->mapped_lock);
	if (more) {
		tmb_fetch_or(&me->pending, TMB_PENDING_EVENT);
		mod_delayed_work(s->work_queue, &s->poll, 0);
		return;
	}
	if (!again)
		return;
	if (busy || lingering || s->fs.read_only || !tmb_doorbell_attached(&s->doorbell) || !tmb_load(&me->doorbell) || tmb_someone_cannot_ring(s))
		queue_delayed_work(s->work_queue, &s->poll, msecs_to_jiffies(TMB_POLL_MS));
	else
		queue_delayed_work(s->work_queue, &s->poll, msecs_to_jiffies(TMB_WATCH_MS));
}

/* Called after a doorbell: looks at once. */
void tmb_mappings_look(struct tmb_sb *s)
{
	mod_delayed_work(s->work_queue, &s->poll, 0);
}

static void tmb_recover(struct work_struct *work)
{
	tfs_recover_all(&container_of(work, struct tmb_sb, recovery)->fs);
}

void tmb_mappings_start(struct tmb_sb *s)
{
	INIT_WORK(&s->recovery, tmb_recover);
	INIT_DELAYED_WORK(&s->poll, tmb_look);
}

void tmb_mappings_stop(struct tmb_sb *s)
{
	if (!s->poll.work.func)
		return;
	cancel_delayed_work_sync(&s->poll);
	flush_work(&s->recovery);
}
