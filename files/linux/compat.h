/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The differences between the supported kernels, 6.1 to 6.12. The rest of the module is written for 6.12.
 */
#ifndef TOMBOLO_COMPAT_H
#define TOMBOLO_COMPAT_H

#include <linux/blkdev.h>
#include <linux/fs.h>
#include <linux/fsnotify.h>
#include <linux/huge_mm.h>
#include <linux/mm.h>
#include <linux/posix_acl.h>
#include <linux/version.h>

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 1, 0) || LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
#error "tombolo.ko is written for Linux 6.1 to 6.12"
#endif

/* 6.3: mnt_idmap became a type of its own. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
typedef struct mnt_idmap tmb_idmap;
#define tmb_nop_idmap (&nop_mnt_idmap)
#define tmb_file_idmap(file) file_mnt_idmap(file)
#else
typedef struct user_namespace tmb_idmap;
#define tmb_nop_idmap (&init_user_ns)
#define tmb_file_idmap(file) file_mnt_user_ns(file)
static inline void tmb_vm_flags_set(struct vm_area_struct *vma, vm_flags_t flags)
{
	vma->vm_flags |= flags;
}
#define vm_flags_set tmb_vm_flags_set
#endif

/* 6.2: set_acl() gets the dentry. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
#define TMB_ACL_BY_DENTRY 1
#else
#define TMB_ACL_BY_DENTRY 0
#endif

/*
 * 6.5: cachestat(2) takes the entries of fs/dax in a file's mapping for shadows of evicted pages, and follows node numbers that it finds in them. So
 * what is mapped is kept in a mapping that no open file leads to (mmap.c).
 */
#define TMB_PAGES_APART (LINUX_VERSION_CODE >= KERNEL_VERSION(6, 5, 0))

/* 6.6: generic_fillattr() gets the request mask; ctime by accessor, times kept differently in update_time(). */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 6, 0)
#define tmb_fillattr(idmap, mask, inode, stat) generic_fillattr(idmap, mask, inode, stat)
#else
#define tmb_fillattr(idmap, mask, inode, stat) generic_fillattr(idmap, inode, stat)
#endif

/* 6.7: atime and mtime by accessor. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 7, 0)
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
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
#include <linux/filelock.h>
#endif
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 9, 0)
#define tmb_fl(fl, field) ((fl)->c.flc_##field)
#else
#define tmb_fl(fl, field) ((fl)->fl_##field)
#endif

/* 6.6: the order of a huge fault as a number. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 6, 0)
typedef unsigned int tmb_order;
#define TMB_ORDER_PTE 0
#define TMB_ORDER_PMD PMD_ORDER
#else
typedef enum page_entry_size tmb_order;
#define TMB_ORDER_PTE PE_SIZE_PTE
#define TMB_ORDER_PMD PE_SIZE_PMD
#endif

/* 6.5: splicing from a file without page cache. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 5, 0)
#define tmb_splice_read copy_splice_read
#else
#define tmb_splice_read generic_file_splice_read
#endif

/* 6.10: the count of a file system's watchers moved. */
static inline bool tmb_has_watchers(struct super_block *sb)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 10, 0)
	return fsnotify_sb_has_watchers(sb);
#else
	return atomic_long_read(&sb->s_fsnotify_connectors);
#endif
}

/* Up to 6.14 an idle DAX page has one reference. */
static inline bool tmb_page_busy(struct page *page)
{
	return page_ref_count(page) > 1;
}

/* 6.8: an open block device is a file. holder NULL: shared. */
struct tmb_bdev {
	struct block_device *bdev;
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 8, 0)
	struct file *file;
#else
	fmode_t mode;
#endif
};

static inline int tmb_bdev_open(struct tmb_bdev *b, const char *path, bool write, void *holder)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 8, 0)
	b->file = bdev_file_open_by_path(path, BLK_OPEN_READ | (write ? BLK_OPEN_WRITE : 0), holder, NULL);
	if (IS_ERR(b->file))
		return PTR_ERR(b->file);
	b->bdev = file_bdev(b->file);
#elif LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
#error "block devices of 6.2 to 6.7 are not covered"
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
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 8, 0)
	bdev_fput(b->file);
#else
	blkdev_put(b->bdev, b->mode);
#endif
	b->bdev = NULL;
}

#endif
