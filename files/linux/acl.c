// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* POSIX ACLs: stored as the extended attributes that user space knows, never cached by the VFS. */
#include "tombolo.h"

#include <linux/slab.h>
#include <linux/xattr.h>

#include <linux/posix_acl_xattr.h>

static const char *tmb_acl_name(int type)
{
	return type == ACL_TYPE_ACCESS ? XATTR_NAME_POSIX_ACL_ACCESS : XATTR_NAME_POSIX_ACL_DEFAULT;
}

struct posix_acl *tmb_get_acl(struct inode *inode, int type, bool rcu)
{
	struct tfs *fs = tmb_fs(inode);
	struct posix_acl *acl;
	void *value;
	s64 n;
	int tries;

	/* The caller's permission check has refreshed the inode. */
	if (!READ_ONCE(tmb_i(inode)->seen.has_xattr))
		return NULL;
	if (rcu)
		return ERR_PTR(-ECHILD);
	for (tries = 0; tries < 8; tries++) {
		n = tfs_xattr_get(fs, tmb_h(inode), tmb_acl_name(type), NULL, 0);
		if (n == -ENODATA || n == 0)
			return NULL;
		if (n < 0)
			return ERR_PTR(n);
		value = kvmalloc(n, GFP_KERNEL);
		if (!value)
			return ERR_PTR(-ENOMEM);
		n = tfs_xattr_get(fs, tmb_h(inode), tmb_acl_name(type), value, n);
		if (n == -ERANGE) { /* it grew meanwhile */
			kvfree(value);
			continue;
		}
		if (n == -ENODATA)
			acl = NULL;
		else if (n < 0)
			acl = ERR_PTR(n);
		else
			acl = posix_acl_from_xattr(&init_user_ns, value, n);
		kvfree(value);
		return acl;
	}
	return ERR_PTR(-EIO);
}

static int tmb_acl_encode(const struct posix_acl *acl, void **value, size_t *size)
{
	*value = NULL;
	*size = 0;
	if (!acl)
		return 0;
	*value = tmb_acl_to_xattr(acl, size);
	return PTR_ERR_OR_ZERO(*value);
}

/* Stores the ACL, and mode unless it is negative; how: TFS_XATTR_*; checked: as for tfs_xattr_set(). */
static int tmb_store_attributes(struct inode *inode, int type, const struct posix_acl *acl, int mode, u32 how, const struct tfs_attr *checked)
{
	void *value;
	size_t size;
	int err = tmb_acl_encode(acl, &value, &size);

	if (err)
		return err;
	err = tfs_xattr_set(tmb_fs(inode), tmb_h(inode), tmb_acl_name(type), value, size, how, mode, checked, tfs_os_now());
	kfree(value);
	return err == -ENODATA && !acl ? 0 : err; /* nothing to remove */
}

/* Sets an ACL by the rights that follow from 'checked'. -EAGAIN: the file has another owner or other flags by now. */
static int tmb_change_acl(tmb_idmap *idmap, struct inode *inode, struct posix_acl *acl, int type, const struct tfs_attr *checked)
{
	u32 how = TFS_XATTR_PERMISSIONS;
	umode_t mode = inode->i_mode;
	bool change_mode = false;

	/* The VFS has checked the owner and the flags that this kernel knew. */
	if (!inode_owner_or_capable(idmap, inode) || IS_IMMUTABLE(inode) || IS_APPEND(inode))
		return -EPERM;
	if (type == ACL_TYPE_ACCESS && acl) {
		int err = posix_acl_update_mode(idmap, inode, &mode, &acl);

		if (err)
			return err;
		change_mode = true;
		/* It cleared the bit if the caller is not in the group. The other bits are left to members that change them now. */
		if (inode->i_mode & ~mode & S_ISGID)
			how |= TFS_XATTR_KILL_SGID;
	} else if (type == ACL_TYPE_DEFAULT && !S_ISDIR(inode->i_mode)) {
		return acl ? -EACCES : 0;
	}
	return tmb_store_attributes(inode, type, acl, change_mode ? mode & 0777 : -1, how, checked);
}

static int tmb_store_acl(tmb_idmap *idmap, struct inode *inode, struct posix_acl *acl, int type)
{
	struct tfs_attr checked;
	unsigned int tries = 0;
	int err;

	do {
		err = tmb_refresh_to(inode, &checked);
		if (!err)
			err = tmb_change_acl(idmap, inode, acl, type, &checked);
	} while (tmb_check_again(&err, &tries));
	if (err)
		return err;
	tmb_tell_inode(inode, FS_ATTRIB);
	return tmb_refresh(inode);
}

#if TMB_HAS_ACL_BY_DENTRY
int tmb_set_acl(tmb_idmap *idmap, struct dentry *dentry, struct posix_acl *acl, int type)
{
	return tmb_store_acl(idmap, d_inode(dentry), acl, type);
}
#else
int tmb_set_acl(tmb_idmap *idmap, struct inode *inode, struct posix_acl *acl, int type)
{
	return tmb_store_acl(idmap, inode, acl, type);
}
#endif

static size_t tmb_image_entry_size(const char *name, size_t value)
{
	return ALIGN(sizeof(struct tfs_xattr_entry) + strlen(name) + value, 8);
}

static u8 *tmb_image_entry(u8 *p, const char *name, const void *value, size_t size)
{
	struct tfs_xattr_entry e = { .name_len = strlen(name), .value_len = size };

	memcpy(p, &e, sizeof(e));
	memcpy(p + sizeof(e), name, e.name_len);
	memcpy(p + sizeof(e) + e.name_len, value, size);
	return p + tmb_image_entry_size(name, size);
}

int tmb_initial_xattrs(struct inode *dir, umode_t *mode, void **image, u32 *length)
{
	struct posix_acl *acl = NULL, *default_acl = NULL;
	void *acl_value = NULL, *default_value = NULL;
	size_t acl_size, default_size, bytes = sizeof(struct tfs_xattr_image);
	u8 *p;
	int err;

	*image = NULL;
	*length = 0;
	err = posix_acl_create(dir, mode, &default_acl, &acl);
	if (err || (!acl && !default_acl))
		return err;
	err = tmb_acl_encode(acl, &acl_value, &acl_size);
	if (!err)
		err = tmb_acl_encode(default_acl, &default_value, &default_size);
	if (err)
		goto out;
	if (acl_value)
		bytes += tmb_image_entry_size(XATTR_NAME_POSIX_ACL_ACCESS, acl_size);
	if (default_value)
		bytes += tmb_image_entry_size(XATTR_NAME_POSIX_ACL_DEFAULT, default_size);
	p = kzalloc(bytes, GFP_KERNEL);
	if (!p) {
		err = -ENOMEM;
		goto out;
	}
	*image = p;
	*length = bytes;
	((struct tfs_xattr_image *)p)->bytes = bytes;
	((struct tfs_xattr_image *)p)->count = !!acl_value + !!default_value;
	p += sizeof(struct tfs_xattr_image);
	if (acl_value)
		p = tmb_image_entry(p, XATTR_NAME_POSIX_ACL_ACCESS, acl_value, acl_size);
	if (default_value)
		tmb_image_entry(p, XATTR_NAME_POSIX_ACL_DEFAULT, default_value, default_size);
out:
	kfree(acl_value);
	kfree(default_value);
	posix_acl_release(acl);
	posix_acl_release(default_acl);
	return err;
}
