// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * File handles: for name_to_handle_at(2), NFS servers, overlayfs's index and fanotify's identifiers. A handle is an inode's number and generation,
 * and those of its directory where the caller asks for them, so it is the same for each member and after each mount. A handle of a file that has been
 * removed gives ESTALE. A mount that is confined to a directory has none: a file's handle doesn't say below which directory it is.
 */
#include "tombolo.h"

#include <linux/dcache.h>
#include <linux/exportfs.h>

/* The types of handles, which no other file system's equal (linux/exportfs.h). */
#define TMB_FID 0x74
#define TMB_FID_PARENT 0x75

struct tmb_fid {
	__le32 low, high, generation;
};
#define TMB_FID_WORDS (sizeof(struct tmb_fid) / sizeof(u32))

static void tmb_put_fid(struct tmb_fid *fid, struct inode *inode)
{
	*fid = (struct tmb_fid){
		.low = cpu_to_le32(lower_32_bits(inode->i_ino)),
		.high = cpu_to_le32(upper_32_bits(inode->i_ino)),
		.generation = cpu_to_le32(tmb_i(inode)->generation),
	};
}

static int tmb_encode_fh(struct inode *inode, __u32 *words, int *count, struct inode *parent)
{
	struct tmb_fid *fids = (struct tmb_fid *)words;
	int needed = parent ? 2 * TMB_FID_WORDS : TMB_FID_WORDS, had = *count;

	*count = needed;
	if (had < needed)
		return FILEID_INVALID;
	tmb_put_fid(&fids[0], inode);
	if (parent)
		tmb_put_fid(&fids[1], parent);
	return parent ? TMB_FID_PARENT : TMB_FID;
}

static struct dentry *tmb_decode(struct super_block *sb, const struct tmb_fid *fid)
{
	const struct tfs_handle h = {
		.ino = (u64)le32_to_cpu(fid->high) << 32 | le32_to_cpu(fid->low),
		.generation = le32_to_cpu(fid->generation),
	};

	/* Generation 0 would be any file that has the number now. */
	if (!h.generation || !tfs_exists(&tmb_sb(sb)->fs, h))
		return ERR_PTR(-ESTALE);
	return d_obtain_alias(tmb_iget(sb, h));
}

static struct dentry *tmb_fh_to_dentry(struct super_block *sb, struct fid *fid, int count, int type)
{
	if ((type != TMB_FID && type != TMB_FID_PARENT) || count < (int)TMB_FID_WORDS)
		return NULL;
	return tmb_decode(sb, (struct tmb_fid *)fid->raw);
}

static struct dentry *tmb_fh_to_parent(struct super_block *sb, struct fid *fid, int count, int type)
{
	if (type != TMB_FID_PARENT || count < 2 * (int)TMB_FID_WORDS)
		return NULL;
	return tmb_decode(sb, (struct tmb_fid *)fid->raw + 1);
}

static struct dentry *tmb_get_parent(struct dentry *child)
{
	struct inode *inode = d_inode(child), *parent;
	u64 ino = tfs_parent(tmb_fs(inode), tmb_h(inode));

	if (!ino)
		return ERR_PTR(-ESTALE);
	parent = tmb_iget(inode->i_sb, (struct tfs_handle){ .ino = ino });
	/* The directory has moved meanwhile, and its old parent's number is another file's. */
	if (!IS_ERR(parent) && !S_ISDIR(parent->i_mode)) {
		iput(parent);
		return ERR_PTR(-ESTALE);
	}
	return d_obtain_alias(parent);
}

const struct export_operations tmb_export_ops = {
	.encode_fh = tmb_encode_fh,
	.fh_to_dentry = tmb_fh_to_dentry,
	.fh_to_parent = tmb_fh_to_parent,
	.get_parent = tmb_get_parent,
};
