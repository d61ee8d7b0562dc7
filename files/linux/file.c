// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Data. read() and write() copy once, between the user's memory and the zone. There is no page cache, so O_DIRECT changes nothing. A
 * reader takes no lock: it pins the inode's blocks during one copy. Copies run with page faults off, because a fault may need what the
 * copy holds (the buffer may be a mapping of the same file). A part that is not present is faulted in with nothing held, and copied
 * again.
 */
#include "tombolo.h"

#include <linux/capability.h>
#include <linux/falloc.h>
#include <linux/fiemap.h>
#include <linux/pagemap.h>
#include <linux/sched/signal.h>
#include <linux/splice.h>
#include <linux/uio.h>

#define TMB_COPY_BLOCKS 256u	/* copied under one pin: 1 MiB */
/*
 * Copies bypass the cache if they are large, or if they fill whole blocks of files too large for a cache. There a plain copy first reads
 * what it overwrites (4 KiB at random in 512 MiB: 3.0 GB/s, bypassing the cache 8.3; in 1 MiB: 15 and 7).
 */
#define TMB_STREAM_BYTES 16384
#define TMB_STREAM_FILE (32ULL << 20)
#define TMB_PINNED_MS 30000	/* how long a truncation waits for pages that are in a pipe or under direct I/O, before it gives -EBUSY */
#define TMB_WRITE_RESTARTS 8	/* of a write whose buffer faults, before it is split */

static size_t tmb_copy_out(struct tfs *fs, const struct tfs_run *run, size_t skip, size_t n, struct iov_iter *to)
{
	size_t done;

	pagefault_disable();
	if (run->block)
		done = _copy_to_iter(tfs_block(fs, run->block) + skip, n, to);
	else
		done = iov_iter_zero(n, to);
	pagefault_enable();
	return done;
}

static ssize_t tmb_read_iter(struct kiocb *iocb, struct iov_iter *to)
{
	struct inode *inode = file_inode(iocb->ki_filp);
	struct tfs *fs = tmb_fs(inode);
	loff_t pos = iocb->ki_pos;
	ssize_t total = 0;
	unsigned int tries = 0;
	int err = 0;

	while (iov_iter_count(to)) {
		struct tfs_look look;
		size_t skip = pos & (TFS_BLOCK - 1), done;
		size_t most = min_t(size_t, iov_iter_count(to), TMB_COPY_BLOCKS * TFS_BLOCK - skip);
		s64 n = tfs_look_begin(fs, tmb_h(inode), pos, most, &look), there;

		if (n <= 0) {
			err = n;
			break;
		}
		done = tmb_copy_out(fs, &look.run, skip, n, to);
		there = tfs_look_end(fs, &look, pos, done);
		if (there == -EAGAIN) {
			iov_iter_revert(to, done);
			if (++tries > TFS_READ_TRIES) {
				err = -EBUSY;
				break;
			}
			cond_resched();
			continue;
		}
		if (there < (s64)done) { /* another member has cut or removed the file meanwhile */
			err = there < 0 ? there : 0;
			there = there < 0 ? 0 : there;
			iov_iter_revert(to, done - there);
			pos += there;
			total += there;
			break;
		}
		pos += done;
		total += done;
		if (done < n && fault_in_iov_iter_writeable(to, n - done) == n - done) {
			err = -EFAULT;
			break;
		}
		if (fatal_signal_pending(current)) {
			err = -EINTR;
			break;
		}
		cond_resched();
	}
	iocb->ki_pos = pos;
	if (total || (!err && iov_iter_count(to))) /* also at the end of the file */
		file_accessed(iocb->ki_filp);
	return total ? total : err;
}

/* --- writing ----------------------------------------------------------------------------------------------- */

/* Copies into one run that tfs_write_map gave, and zeroes the rest of new blocks. Returns bytes copied. */
static size_t tmb_copy_in(struct tfs *fs, const struct tfs_write *w, u64 size, size_t skip, size_t n, struct iov_iter *from)
{
	bool stream = n >= TMB_STREAM_BYTES || (n >= TFS_BLOCK && size > TMB_STREAM_FILE);
	u8 *start = tfs_block(fs, w->run.block);
	size_t done;

	if (w->is_new && skip)
		memset(start, 0, skip);
	pagefault_disable();
	done = stream ? _copy_from_iter_flushcache(start + skip, n, from) : _copy_from_iter(start + skip, n, from);
	pagefault_enable();
	/* Copies from kernel memory (splice, loop devices) don't order their streaming stores before the store that links the block. */
	if (stream)
		wmb();
	if (w->is_new && skip + done < w->run.count << TFS_BLOCK_SHIFT)
		memset(start + skip + done, 0, (w->run.count << TFS_BLOCK_SHIFT) - skip - done);
	return done;
}

/*
 * Writes 'from' at pos, with the inode locked here and across members. *done: bytes written. If the buffer is not present: -EAGAIN, and
 * nothing is written, since other members see whole writes; or, with 'pieces', -EFAULT, and the part before is written.
 */
static int tmb_write_locked(struct inode *inode, struct tfs_write *w, const struct tfs_attr *attr, loff_t pos, struct iov_iter *from,
			    bool pieces, size_t *done)
{
	struct tfs *fs = tmb_fs(inode);
	bool kill_suid = attr->mode & (S_ISUID | S_ISGID) && !capable(CAP_FSETID);
	size_t want = iov_iter_count(from);
	int err = 0, end_err;

	*done = 0;
	if (pos + want > attr->size)
		err = tfs_extend_zero_locked(fs, tmb_h(inode), pos);
	while (!err && *done < want) {
		size_t skip = (pos + *done) & (TFS_BLOCK - 1), n, copied;
		u64 left = want - *done;

		err = tfs_write_map_locked(fs, w, (pos + *done) >> TFS_BLOCK_SHIFT,
					   (skip + left + TFS_BLOCK - 1) >> TFS_BLOCK_SHIFT);
		if (err)
			break;
		n = min_t(u64, left, (w->run.count << TFS_BLOCK_SHIFT) - skip);
		copied = tmb_copy_in(fs, w, attr->size, skip, n, from);
		err = tfs_write_done_locked(fs, w);
		if (err)
			break;
		*done += copied;
		if (copied < n)
			err = pieces ? -EFAULT : -EAGAIN;
		cond_resched();
	}
	if (err == -EAGAIN)
		*done = 0;
	tfs_write_trim_locked(fs, w, *done ? pos + *done : 0);
	end_err = tfs_write_end_locked(fs, w, *done ? pos + *done : 0, kill_suid, tfs_os_now());
	return end_err ? end_err : err;
}

/* Removes setuid bits and capabilities, which other members may have set since this kernel last looked. */
static int tmb_remove_privileges(struct file *file)
{
	struct inode *inode = file_inode(file);
	int err = tmb_refresh(inode);

	if (err || (!(inode->i_mode & (S_ISUID | S_ISGID)) && !READ_ONCE(tmb_i(inode)->seen.has_xattr)))
		return err;
	inode->i_flags &= ~S_NOSEC;
	return file_remove_privs(file);
}

/* Releases what tfs_write_begin took, with nothing written. */
static void tmb_abandon_write(struct tfs *fs, struct tfs_write *w)
{
	tfs_write_end_locked(fs, w, 0, false, 0);
	tfs_unlock_inode(fs, w->h.ino);
}

/* Begins a write: locks the inode across members and removes its privileges. */
static int tmb_lock_for_write(struct file *file, struct tfs_write *w, struct tfs_attr *attr)
{
	struct inode *inode = file_inode(file);
	struct tfs *fs = tmb_fs(inode);
	bool removed = false;
	int err;

	for (;;) {
		err = tfs_write_begin(fs, tmb_h(inode), w);
		if (err)
			return err;
		err = tfs_getattr(fs, tmb_h(inode), attr);
		if (!err && attr->flags & TFS_FL_IMMUTABLE)
			err = -EPERM;
		if (!err && (removed || (!(attr->mode & (S_ISUID | S_ISGID)) && !attr->has_xattr)))
			return 0;
		tmb_abandon_write(fs, w);
		if (!err)
			err = tmb_remove_privileges(file);
		if (err)
			return err;
		removed = true;
	}
}

static ssize_t tmb_write_iter(struct kiocb *iocb, struct iov_iter *from)
{
	struct file *file = iocb->ki_filp;
	struct inode *inode = file_inode(file);
	struct tfs *fs = tmb_fs(inode);
	size_t total = 0;
	unsigned int restarts = 0;
	bool pieces = false, filled = false;
	ssize_t err;

	if (!iov_iter_count(from))
		return 0;
	inode_lock(inode);
	for (;;) {
		struct iov_iter saved;
		struct tfs_write w;
		size_t done = 0, want, left;
		struct tfs_attr attr;

		err = tmb_lock_for_write(file, &w, &attr);
		if (err)
			break;
		/* generic_write_checks() takes the end from this kernel's copy. Only a holder of the core's lock changes the size. */
		if (iocb->ki_flags & IOCB_APPEND)
			tmb_refresh_size(inode);
		err = generic_write_checks(iocb, from);
		if (err <= 0) {
			tmb_abandon_write(fs, &w);
			break;
		}
		want = err;
		saved = *from;
		err = tmb_write_locked(inode, &w, &attr, iocb->ki_pos, from, pieces, &done);
		if (iocb->ki_pos + done > attr.size)
			tmb_refresh_size(inode);
		tfs_unlock_inode(fs, inode->i_ino);
		filled |= w.started;
		iocb->ki_pos += done;
		total += done;
		if (err == -EAGAIN) {
			*from = saved;
			done = 0;
		} else if (err != -EFAULT) {
			break;
		}
		if (fatal_signal_pending(current)) {
			err = -EINTR;
			break;
		}
		/* The buffer may be paged out again and again, or be unmapped further on: then the write is split. */
		left = fault_in_iov_iter_readable(from, want - done);
		pieces = pieces || left || ++restarts >= TMB_WRITE_RESTARTS;
		if (left == want - done) {
			err = -EFAULT;
			break;
		}
	}
	if (filled)
		tmb_holes_filled(inode, 0, 0);
	inode_unlock(inode);
	if (total)
		tmb_tell(file_dentry(file), FS_MODIFY);
	return total ? total : err;
}

/* --- size and space ------------------------------------------------------------------------------------------ */

/* Locks the inode across members, and refuses what the file's flags forbid. A file that is given loses its privileges, as by a write. */
static int tmb_lock_for_removal(struct inode *inode, struct file *file, struct tfs_write *w)
{
	struct tfs *fs = tmb_fs(inode);
	struct tfs_attr attr;
	int err;

	if (file) {
		err = tmb_lock_for_write(file, w, &attr);
		if (err)
			return err;
	} else {
		err = tfs_write_begin(fs, tmb_h(inode), w);
		if (err)
			return err;
		err = tfs_getattr(fs, tmb_h(inode), &attr);
	}
	if (!err && attr.flags & (TFS_FL_IMMUTABLE | TFS_FL_APPEND))
		err = -EPERM;
	if (err)
		tmb_abandon_write(fs, w);
	return err;
}

/*
 * Locks the inode across members, unmaps it here and keeps page faults out (invalidate_lock). Faults and the worker wait for that lock without end, so it
 * is not held while this waits for another member, or for pages in a pipe or under direct I/O. The caller's i_rwsem is released while it waits for pages,
 * so what the caller has checked is checked again.
 */
static int tmb_begin_removal(struct inode *inode, struct file *file, struct tfs_write *w)
{
	unsigned long until = jiffies + msecs_to_jiffies(TMB_PINNED_MS), pause = 1;
	struct tfs *fs = tmb_fs(inode);
	int err;

	for (;;) {
		err = tmb_lock_for_removal(inode, file, w);
		if (err)
			return err;
		filemap_invalidate_lock(inode->i_mapping);
		err = tmb_revoke_locked(inode);
		if (!err)
			return 0;
		filemap_invalidate_unlock(inode->i_mapping);
		tmb_abandon_write(fs, w);
		if (err != -EBUSY || time_after(jiffies, until))
			return err;
		/* A process that unlinks or renames the file waits for i_rwsem with its directory's held. */
		inode_unlock(inode);
		schedule_timeout_killable(pause);
		inode_lock(inode);
		if (fatal_signal_pending(current))
			return -EINTR;
		pause = min_t(unsigned long, pause * 2, HZ / 20 + 1);
	}
}

static void tmb_end_removal(struct inode *inode)
{
	filemap_invalidate_unlock(inode->i_mapping);
	tfs_unlock_inode(tmb_fs(inode), inode->i_ino);
}

int tmb_truncate(struct inode *inode, loff_t size, bool kill_suid)
{
	struct tfs_write w;
	int err = tmb_begin_removal(inode, NULL, &w);

	if (err)
		return err;
	err = tfs_truncate_locked(tmb_fs(inode), &w, size, kill_suid, tfs_os_now());
	if (!err) {
		tmb_refresh_size(inode);
		/* Private copies of pages beyond the end go too. */
		unmap_mapping_range(tmb_pages(inode), round_up(size, PAGE_SIZE), 0, 1);
	}
	tmb_end_removal(inode);
	return err;
}

static int tmb_punch(struct file *file, loff_t offset, loff_t length)
{
	struct inode *inode = file_inode(file);
	struct tfs_write w;
	int err = tmb_begin_removal(inode, file, &w);

	if (err)
		return err;
	err = tfs_punch_locked(tmb_fs(inode), &w, offset, offset + length, tfs_os_now());
	tmb_end_removal(inode);
	return err;
}

static long tmb_fallocate(struct file *file, int mode, loff_t offset, loff_t length)
{
	struct inode *inode = file_inode(file);
	u32 how = 0;
	long err;

	if (mode & ~(FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE))
		return -EOPNOTSUPP;
	if (mode & FALLOC_FL_KEEP_SIZE)
		how |= TFS_FALLOC_KEEP_SIZE;
	if (mode & FALLOC_FL_ZERO_RANGE)
		how |= TFS_FALLOC_ZERO;
	inode_lock(inode);
	err = tmb_refresh(inode);
	/* The VFS has checked the flags that this kernel knew. */
	if (!err && (IS_IMMUTABLE(inode) || (IS_APPEND(inode) && mode & ~FALLOC_FL_KEEP_SIZE)))
		err = -EPERM;
	if (!err)
		err = tmb_remove_privileges(file);
	if (!err && !(mode & FALLOC_FL_KEEP_SIZE) && offset + length > i_size_read(inode))
		err = inode_newsize_ok(inode, offset + length);
	if (err)
		goto out;
	if (mode & FALLOC_FL_PUNCH_HOLE) {
		err = tmb_punch(file, offset, length);
	} else {
		err = tfs_fallocate(tmb_fs(inode), tmb_h(inode), how, offset, length, tfs_os_now());
		tmb_holes_filled(inode, offset, length);
	}
	if (!err)
		err = tmb_refresh(inode);
out:
	inode_unlock(inode);
	if (!err)
		tmb_tell(file_dentry(file), FS_MODIFY);
	return err;
}

static loff_t tmb_llseek(struct file *file, loff_t offset, int whence)
{
	struct inode *inode = file_inode(file);
	struct tfs *fs = tmb_fs(inode);

	if (whence == SEEK_DATA || whence == SEEK_HOLE) {
		s64 at = offset < 0 ? -ENXIO : tfs_seek(fs, tmb_h(inode), offset, whence == SEEK_HOLE);

		return at < 0 ? at : vfs_setpos(file, at, inode->i_sb->s_maxbytes);
	}
	return generic_file_llseek_size(file, offset, whence, inode->i_sb->s_maxbytes, tfs_size(fs, tmb_h(inode)));
}

/* Gives the extent at 'at' or after it, before 'end': its first block's place in the file, and the blocks. -ENXIO: none. */
static s64 tmb_extent(struct tfs *fs, struct tfs_handle h, u64 at, u64 end, struct tfs_run *run)
{
	unsigned int tries;

	for (tries = 0; tries < TFS_READ_TRIES; tries++) {
		s64 from = tfs_seek(fs, h, at, false), n, there;
		struct tfs_look look;

		if (from < 0 || from >= (s64)end)
			return from < 0 ? from : -ENXIO;
		n = tfs_look_begin(fs, h, from, end - from, &look);
		if (n < 0)
			return n;
		there = n ? tfs_look_end(fs, &look, from, n) : -EAGAIN;
		*run = look.run;
		if (there > 0 && run->block)
			return round_down(from, TFS_BLOCK);
		if (there < 0 && there != -EAGAIN)
			return there;
	}
	return -EBUSY;
}

/* Reports where the file's bytes lie in the zone, up to its end. Each extent was there at some moment of the call. */
int tmb_fiemap(struct inode *inode, struct fiemap_extent_info *info, u64 start, u64 length)
{
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	struct tfs_handle h = tmb_h(inode);
	struct tfs_run run, next;
	s64 at, after;
	u64 end;
	int err;

	err = tmb_refresh(inode);
	if (!err)
		err = fiemap_prep(inode, info, start, &length, 0);
	if (err)
		return err;
	end = start + length;
	for (at = tmb_extent(&s->fs, h, start, end, &run); at >= 0; at = after, run = next) {
		u64 physical = s->zone.files_offset + (run.block << TFS_BLOCK_SHIFT), bytes = run.count << TFS_BLOCK_SHIFT;

		after = tmb_extent(&s->fs, h, at + bytes, TFS_MAX_SIZE, &next);
		err = fiemap_fill_next_extent(info, at, physical, bytes, after == -ENXIO ? FIEMAP_EXTENT_LAST : 0);
		if (err)
			return err < 0 ? err : 0;
		if (after >= (s64)end)
			return 0;
		if (fatal_signal_pending(current))
			return -EINTR;
		cond_resched();
	}
	return at == -ENXIO ? 0 : at;
}

/* A system call's stores are in the zone when it returns. On persistent memory, a mapping's stores may still be in a cache. */
static int tmb_fsync(struct file *file, loff_t start, loff_t end, int datasync)
{
	return tfs_sync(tmb_fs(file_inode(file)), tmb_h(file_inode(file)));
}

const struct file_operations tmb_file_fops = {
	.owner = THIS_MODULE,
	.open = tmb_open_inode,
	.release = tmb_release_inode,
	.read_iter = tmb_read_iter,
	.write_iter = tmb_write_iter,
	.splice_read = tmb_splice_read,
	.splice_write = iter_file_splice_write,
	.llseek = tmb_llseek,
	.fallocate = tmb_fallocate,
	.fsync = tmb_fsync,
	.lock = tmb_lock,
	.flock = tmb_flock,
	TMB_NO_LEASE /* a lease here would not exclude other members */
	.mmap = tmb_mmap,
	.get_unmapped_area = thp_get_unmapped_area,
};
