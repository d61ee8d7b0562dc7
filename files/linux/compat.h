/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The differences between the supported kernels, 6.1 to 7.3. The rest of the module is written for 6.12 as far as it can be. probed.h says what
 * this kernel's headers have (probes); the versions in comments are mainline's.
 */
#ifndef TOMBOLO_COMPAT_H
#define TOMBOLO_COMPAT_H

#include <linux/blkdev.h>
#include <linux/dax.h>
#include <linux/fileattr.h>
#include <linux/fs.h>
#include <linux/fsnotify.h>
#include <linux/huge_mm.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/posix_acl.h>
#include <linux/posix_acl_xattr.h>
#include <linux/slab.h>
#include <linux/version.h>

#include "probed.h"

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 1, 0)
#error "tombolo.ko is written for Linux 6.1 and newer"
#endif

/* 6.3: mnt_idmap became a type of its own. */
#if TMB_HAS_IDMAP
typedef struct mnt_idmap tmb_idmap;
#define tmb_nop_idmap (&nop_mnt_idmap)
#define tmb_file_idmap(file) file_mnt_idmap(file)
#else
typedef struct user_namespace tmb_idmap;
#define tmb_nop_idmap (&init_user_ns)
#define tmb_file_idmap(file) file_mnt_user_ns(file)
#endif
#if !TMB_HAS_VM_FLAGS_SET
static inline void tmb_vm_flags_set(struct vm_area_struct *vma, vm_flags_t flags)
{
	vma->vm_flags |= flags;
}
#define vm_flags_set tmb_vm_flags_set
#endif

/*
 * 6.5: cachestat(2) takes the entries of fs/dax in a file's mapping for shadows of evicted pages, and follows node numbers that it finds in them. So
 * what is mapped is kept in a mapping that no open file leads to (mmap.c).
 */
#define TMB_PAGES_APART TMB_HAS_CACHESTAT

/* 6.6: generic_fillattr() gets the request mask; ctime by accessor, times kept differently in update_time(). */
#if TMB_HAS_FILLATTR_MASK
#define tmb_fillattr(idmap, mask, inode, stat) generic_fillattr(idmap, mask, inode, stat)
#else
#define tmb_fillattr(idmap, mask, inode, stat) generic_fillattr(idmap, inode, stat)
#endif

/* 6.7: atime and mtime by accessor. */
#if !TMB_HAS_ATIME_TO_TS
static inline void tmb_inode_set_atime_to_ts(struct inode *inode, struct timespec64 ts)
{
	inode->i_atime = ts;
}
static inline void tmb_inode_set_mtime_to_ts(struct inode *inode, struct timespec64 ts)
{
	inode->i_mtime = ts;
}
#define inode_set_atime_to_ts tmb_inode_set_atime_to_ts
#define inode_set_mtime_to_ts tmb_inode_set_mtime_to_ts
#endif

/* 6.9: the common part of all kinds of file locks moved into a struct of its own. */
#if __has_include(<linux/filelock.h>)
#include <linux/filelock.h>
#endif
#if TMB_HAS_LOCK_CORE
#define tmb_fl(fl, field) ((fl)->c.flc_##field)
#else
#define tmb_fl(fl, field) ((fl)->fl_##field)
#endif

/* 6.6: the order of a huge fault as a number. */
#if !TMB_HAS_FAULT_SIZE
typedef unsigned int tmb_order;
#define TMB_ORDER_PTE 0
#define TMB_ORDER_PMD PMD_ORDER
#else
typedef enum page_entry_size tmb_order;
#define TMB_ORDER_PTE PE_SIZE_PTE
#define TMB_ORDER_PMD PE_SIZE_PMD
#endif

/* 6.5: splicing from a file without page cache. */
#if TMB_HAS_COPY_SPLICE_READ
#define tmb_splice_read copy_splice_read
#else
#define tmb_splice_read generic_file_splice_read
#endif

/* 6.10: the count of a file system's watchers moved. */
static inline bool tmb_has_watchers(struct super_block *sb)
{
#if TMB_HAS_SB_WATCHERS
	return fsnotify_sb_has_watchers(sb);
#else
	return atomic_long_read(&sb->s_fsnotify_connectors);
#endif
}

/*
 * 6.15: each mapping of a DAX page has a reference of it, and the kernel's memory management knows the page (vm_normal_page). Before, an idle one had one
 * reference. The place where a page is mapped is its folio's. NULL: nowhere.
 */
static inline bool tmb_page_busy(struct page *page)
{
#if TMB_HAS_DAX_REFERENCES
	return folio_ref_count(page_folio(page)) > 0;
#else
	return page_ref_count(page) > 1;
#endif
}

static inline struct address_space *tmb_page_mapping(struct page *page, pgoff_t *index)
{
#if TMB_HAS_DAX_REFERENCES
	struct folio *folio = page_folio(page);

	*index = folio->index + folio_page_idx(folio, page);
	return READ_ONCE(folio->mapping);
#else
	*index = page->index;
	return READ_ONCE(page->mapping);
#endif
}

/* Forgets what is mapped of 'pages', where nothing is in use. */
static inline void tmb_drop_pages(struct address_space *pages)
{
#if TMB_HAS_DAX_REFERENCES
	dax_delete_mapping_range(pages, 0, LLONG_MAX); /* truncation takes the rest for a defect */
#endif
	truncate_inode_pages_range(pages, 0, -1);
}

/* 6.14: the parent and the name come with the dentry. */
#if TMB_HAS_REVALIDATE_NAME
#define TMB_REVALIDATE_ARGS struct inode *parent_inode, const struct qstr *wanted, struct dentry *dentry, unsigned int flags
#else
#define TMB_REVALIDATE_ARGS struct dentry *dentry, unsigned int flags
#endif

/* 7.0: a module can't ask dentry_open() for a file that tells no watcher. Such a file's open() says it, instead (tmb_hush). */
#ifdef __FMODE_NONOTIFY
#define TMB_OPEN_NONOTIFY __FMODE_NONOTIFY
static inline void tmb_set_nonotify(struct file *file)
{
}
#else
#define TMB_OPEN_NONOTIFY 0
#define tmb_set_nonotify(file) file_set_fsnotify_mode(file, FMODE_NONOTIFY)
#endif

/* 6.19: a page table entry that holds no page is a leaf. */
#if TMB_HAS_LEAFOPS
#include <linux/leafops.h>
#define tmb_is_uffd_marker(pte) pte_is_uffd_wp_marker(pte)
#else
#define tmb_is_uffd_marker(pte) pte_marker_uffd_wp(pte)
#endif

/* 6.15: mkdir() may return another dentry. */
#if TMB_HAS_MKDIR_DENTRY
typedef struct dentry *tmb_mkdir_result;
#define tmb_mkdir_returns(err) ERR_PTR(err)
#else
typedef int tmb_mkdir_result;
#define tmb_mkdir_returns(err) (err)
#endif

/* 7.3: create() is always exclusive where it matters. */
#if TMB_HAS_CREATE_EXCL
#define TMB_CREATE_EXCL , bool excl
#else
#define TMB_CREATE_EXCL
#endif

/* 6.17 */
#if TMB_HAS_FILE_KATTR
typedef struct file_kattr tmb_fileattr;
#else
typedef struct fileattr tmb_fileattr;
#endif

static inline void tmb_set_d_op(struct super_block *sb, const struct dentry_operations *ops)
{
#if TMB_HAS_DEFAULT_D_OP
	set_default_d_op(sb, ops);
#else
	sb->s_d_op = ops;
#endif
}

/* 6.17: page frames are numbers. Returns the frame behind what dax_direct_access() stores, or 0: it has no struct page. */
#if TMB_HAS_PFN_T
#include <linux/pfn_t.h>
typedef pfn_t tmb_pfn;
static inline unsigned long tmb_pfn_of(tmb_pfn pfn)
{
	return pfn_t_has_page(pfn) ? pfn_t_to_pfn(pfn) : 0;
}
static inline tmb_pfn tmb_pfn_from(unsigned long pfn)
{
	return pfn_to_pfn_t(pfn);
}
#else
typedef unsigned long tmb_pfn;
static inline unsigned long tmb_pfn_of(tmb_pfn pfn)
{
	return pfn_valid(pfn) ? pfn : 0;
}
static inline tmb_pfn tmb_pfn_from(unsigned long pfn)
{
	return pfn;
}
#endif

/* 6.18 */
#if TMB_HAS_JUST_DROP
#define tmb_just_drop inode_just_drop
#else
#define tmb_just_drop generic_delete_inode
#endif
#if TMB_HAS_PAGEMAP_OF_PFN
#define tmb_get_pagemap(pfn) get_dev_pagemap(pfn)
#else
#define tmb_get_pagemap(pfn) get_dev_pagemap(pfn, NULL)
#endif

/* 6.19 */
static inline bool tmb_is_new(struct inode *inode)
{
#if TMB_HAS_STATE_READ
	return inode_state_read_once(inode) & I_NEW;
#else
	return READ_ONCE(inode->i_state) & I_NEW;
#endif
}

/* 7.0: a file without setlease() grants no lease. Before, it granted this kernel's own. */
#if TMB_HAS_NO_LEASE
#define TMB_NO_LEASE .setlease = simple_nosetlease,
#else
#define TMB_NO_LEASE
#endif

/* The extended attribute that an ACL is stored as; the caller frees it. */
static inline void *tmb_acl_to_xattr(const struct posix_acl *acl, size_t *size)
{
#if TMB_HAS_ACL_ALLOCATED /* 7.0 */
	void *value = posix_acl_to_xattr(&init_user_ns, acl, size, GFP_KERNEL);

	return value ? value : ERR_PTR(-ENOMEM);
#else
	void *value = kmalloc(posix_acl_xattr_size(acl->a_count), GFP_KERNEL);
	int n;

	if (!value)
		return ERR_PTR(-ENOMEM);
	n = posix_acl_to_xattr(&init_user_ns, acl, value, posix_acl_xattr_size(acl->a_count));
	if (n < 0) {
		kfree(value);
		return ERR_PTR(n);
	}
	*size = n;
	return value;
#endif
}

/* What find_inode_nowait() finds inodes by. */
#if TMB_HAS_HASH_U64
typedef u64 tmb_hash;
#else
typedef unsigned long tmb_hash;
#endif

/* 6.8: an open block device is a file. holder NULL: shared. */
struct tmb_bdev {
	struct block_device *bdev;
#if TMB_HAS_BDEV_FILE
	struct file *file;
#else
	fmode_t mode;
#endif
};

static inline int tmb_bdev_open(struct tmb_bdev *b, const char *path, bool write, void *holder)
{
#if TMB_HAS_BDEV_FILE
	b->file = bdev_file_open_by_path(path, BLK_OPEN_READ | (write ? BLK_OPEN_WRITE : 0), holder, NULL);
	if (IS_ERR(b->file))
		return PTR_ERR(b->file);
	b->bdev = file_bdev(b->file);
#else
	b->mode = FMODE_READ | (write ? FMODE_WRITE : 0) | (holder ? FMODE_EXCL : 0);
	b->bdev = blkdev_get_by_path(path, b->mode, holder);
	if (IS_ERR(b->bdev))
		return PTR_ERR(b->bdev);
#endif
	return 0;
}

static inline void tmb_bdev_close(struct tmb_bdev *b)
{
#if TMB_HAS_BDEV_FILE
	bdev_fput(b->file);
#else
	blkdev_put(b->bdev, b->mode);
#endif
	b->bdev = NULL;
}

#endif
