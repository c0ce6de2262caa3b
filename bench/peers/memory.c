/*
 * The memory file system: one buffer for each file, names in one hash table whose chains have locks of their own.
 *
 * A node lives as long as anything refers to it: the kernel's lookups and its name each count once. With passthrough each
 * file is a memfd instead of a buffer, which the kernel reads and writes itself.
 */

#define _GNU_SOURCE /* memfd_create */
#include "peer.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct node {
	atomic_uint_fast64_t references;
	atomic_uint_fast64_t children;
	/* Over the attributes and, for reading, over the buffer's place: only growth moves it. */
	pthread_rwlock_t lock;
	mode_t mode;
	uid_t uid;
	gid_t gid;
	unsigned int links;
	struct timespec atime, mtime, ctime;
	char *bytes;
	size_t capacity;
	atomic_size_t size;
	/* With passthrough: the data, and the kernel's number of it once the file was opened. Else -1 and 0. */
	int fd, backing_id;
};

struct name {
	struct name *next;
	struct node *dir;
	struct node *node;
	char text[];
};

/* A power of two, well above the number of names in the benchmark. */
#define CHAINS (1 << 16)
/* Locks for the chains, taken in turn: far more than threads. */
#define LOCKS 1024

static struct name *chains[CHAINS];
static pthread_mutex_t locks[LOCKS];
static bool passthrough;
static struct node root = {
	.references = 1, .mode = S_IFDIR | 0755, .links = 2, .lock = PTHREAD_RWLOCK_INITIALIZER, .fd = -1
};

static struct node *node_of(fuse_ino_t ino)
{
	return ino == FUSE_ROOT_ID ? &root : (struct node *)(uintptr_t)ino;
}

/* Without a request the kernel keeps the number of a backing file until it unmounts. */
static void drop(fuse_req_t req, struct node *node, uint64_t count)
{
	if (atomic_fetch_sub(&node->references, count) != count || node == &root)
		return;
	if (req && node->backing_id)
		fuse_passthrough_close(req, node->backing_id);
	if (node->fd >= 0)
		close(node->fd);
	pthread_rwlock_destroy(&node->lock);
	free(node->bytes);
	free(node);
}

static size_t chain_of(const struct node *dir, const char *text)
{
	uint64_t hash = 0xcbf29ce484222325 ^ (uintptr_t)dir;

	for (; *text; text++)
		hash = (hash ^ (unsigned char)*text) * 0x100000001b3;
	return (hash ^ hash >> 32) & (CHAINS - 1);
}

/* The place of the pointer to the name, or of the one that ends the chain. The chain is locked. */
static struct name **find(size_t chain, const struct node *dir, const char *text)
{
	struct name **at = &chains[chain];

	while (*at && ((*at)->dir != dir || strcmp((*at)->text, text)))
		at = &(*at)->next;
	return at;
}

static void attributes(struct node *node, struct stat *stat)
{
	struct stat data;

	memset(stat, 0, sizeof(*stat));
	stat->st_ino = node == &root ? FUSE_ROOT_ID : (uintptr_t)node;
	pthread_rwlock_rdlock(&node->lock);
	stat->st_mode = node->mode;
	stat->st_nlink = node->links;
	stat->st_uid = node->uid;
	stat->st_gid = node->gid;
	stat->st_atim = node->atime;
	stat->st_mtim = node->mtime;
	stat->st_ctim = node->ctime;
	stat->st_blocks = (blkcnt_t)(node->capacity / 512);
	pthread_rwlock_unlock(&node->lock);
	stat->st_size = (off_t)atomic_load(&node->size);
	stat->st_blksize = 4096;
	if (node->fd >= 0 && !fstat(node->fd, &data)) {
		stat->st_size = data.st_size;
		stat->st_blocks = data.st_blocks;
	}
}

static void entry(struct node *node, struct fuse_entry_param *param)
{
	memset(param, 0, sizeof(*param));
	attributes(node, &param->attr);
	param->ino = param->attr.st_ino;
	param->attr_timeout = TIMEOUT_S;
	param->entry_timeout = TIMEOUT_S;
}

static void memory_lookup(fuse_req_t req, fuse_ino_t parent, const char *text)
{
	struct node *dir = node_of(parent), *node = NULL;
	size_t chain = chain_of(dir, text);
	struct fuse_entry_param param = { .entry_timeout = TIMEOUT_S };
	struct name *name;

	pthread_mutex_lock(&locks[chain % LOCKS]);
	name = *find(chain, dir, text);
	if (name) {
		node = name->node;
		atomic_fetch_add(&node->references, 1);
	}
	pthread_mutex_unlock(&locks[chain % LOCKS]);
	/* Inode 0 lets the kernel remember for a while that there is nothing. */
	if (node)
		entry(node, &param);
	if (fuse_reply_entry(req, &param) == -ENOENT && node)
		drop(NULL, node, 1);
}

static void memory_forget(fuse_req_t req, fuse_ino_t ino, uint64_t count)
{
	if (ino != FUSE_ROOT_ID)
		drop(req, node_of(ino), count);
	fuse_reply_none(req);
}

static void memory_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *forgets)
{
	for (size_t i = 0; i < count; i++) {
		if (forgets[i].ino != FUSE_ROOT_ID)
			drop(req, node_of(forgets[i].ino), forgets[i].nlookup);
	}
	fuse_reply_none(req);
}

/* Makes a node with a name. It has two references: the name's and that of the lookup which the answer is. */
static int make(fuse_req_t req, fuse_ino_t parent, const char *text, mode_t mode, struct node **made)
{
	struct node *dir = node_of(parent), *node = calloc(1, sizeof(*node));
	struct name *name = malloc(sizeof(*name) + strlen(text) + 1), **at;
	size_t chain = chain_of(dir, text);
	int error = 0;

	if (!node || !name) {
		free(node);
		free(name);
		return ENOMEM;
	}
	pthread_rwlock_init(&node->lock, NULL);
	node->references = 2;
	node->fd = passthrough && S_ISREG(mode) ? memfd_create("file", MFD_CLOEXEC) : -1;
	if (passthrough && S_ISREG(mode) && node->fd < 0)
		error = errno;
	node->mode = mode;
	node->uid = fuse_req_ctx(req)->uid;
	node->gid = fuse_req_ctx(req)->gid;
	node->links = S_ISDIR(mode) ? 2 : 1;
	clock_gettime(CLOCK_REALTIME_COARSE, &node->mtime);
	node->atime = node->ctime = node->mtime;
	name->next = NULL;
	name->dir = dir;
	name->node = node;
	strcpy(name->text, text);

	pthread_mutex_lock(&locks[chain % LOCKS]);
	at = find(chain, dir, text);
	if (!error && *at)
		error = EEXIST;
	else if (!error)
		*at = name;
	pthread_mutex_unlock(&locks[chain % LOCKS]);
	if (error) {
		free(name);
		drop(req, node, 2);
		return error;
	}
	atomic_fetch_add(&dir->children, 1);
	*made = node;
	return 0;
}

/* Opens a file for the kernel: past the page cache, or on its memfd, of which the kernel is told once. */
static bool open_node(fuse_req_t req, struct node *node, struct fuse_file_info *fi)
{
	if (node->fd < 0) {
		open_direct(fi);
		return true;
	}
	pthread_rwlock_wrlock(&node->lock);
	if (!node->backing_id)
		node->backing_id = fuse_passthrough_open(req, node->fd);
	fi->backing_id = node->backing_id;
	pthread_rwlock_unlock(&node->lock);
	return fi->backing_id > 0;
}

static void memory_create(fuse_req_t req, fuse_ino_t parent, const char *text, mode_t mode, struct fuse_file_info *fi)
{
	struct fuse_entry_param param;
	struct node *node;
	int error = make(req, parent, text, S_IFREG | (mode & 07777), &node);

	if (error) {
		fuse_reply_err(req, error);
		return;
	}
	entry(node, &param);
	if (!open_node(req, node, fi)) {
		drop(req, node, 1);
		fuse_reply_err(req, EIO);
		return;
	}
	if (fuse_reply_create(req, &param, fi) == -ENOENT)
		drop(NULL, node, 1);
}

static void memory_mkdir(fuse_req_t req, fuse_ino_t parent, const char *text, mode_t mode)
{
	struct fuse_entry_param param;
	struct node *node;
	int error = make(req, parent, text, S_IFDIR | (mode & 07777), &node);

	if (error) {
		fuse_reply_err(req, error);
		return;
	}
	entry(node, &param);
	if (fuse_reply_entry(req, &param) == -ENOENT)
		drop(NULL, node, 1);
}

static void take_away(fuse_req_t req, fuse_ino_t parent, const char *text, bool directory)
{
	struct node *dir = node_of(parent), *node = NULL;
	size_t chain = chain_of(dir, text);
	struct name **at, *name;
	int error = 0;

	pthread_mutex_lock(&locks[chain % LOCKS]);
	at = find(chain, dir, text);
	name = *at;
	if (!name)
		error = ENOENT;
	else if (S_ISDIR(name->node->mode) != directory)
		error = directory ? ENOTDIR : EISDIR;
	else if (atomic_load(&name->node->children))
		error = ENOTEMPTY;
	else
		*at = name->next;
	pthread_mutex_unlock(&locks[chain % LOCKS]);
	if (!error) {
		node = name->node;
		pthread_rwlock_wrlock(&node->lock);
		node->links = 0;
		pthread_rwlock_unlock(&node->lock);
		atomic_fetch_sub(&dir->children, 1);
		free(name);
		drop(req, node, 1);
	}
	fuse_reply_err(req, error);
}

static void memory_unlink(fuse_req_t req, fuse_ino_t parent, const char *text)
{
	take_away(req, parent, text, false);
}

static void memory_rmdir(fuse_req_t req, fuse_ino_t parent, const char *text)
{
	take_away(req, parent, text, true);
}

static void memory_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct stat stat;

	(void)fi;
	attributes(node_of(ino), &stat);
	fuse_reply_attr(req, &stat, TIMEOUT_S);
}

/* Room for a file of this size. The node is locked for writing. */
static bool grow(struct node *node, size_t size)
{
	size_t capacity = node->capacity ? node->capacity : 4096;
	char *bytes;

	if (size <= node->capacity)
		return true;
	while (capacity < size)
		capacity *= 2;
	bytes = realloc(node->bytes, capacity);
	if (!bytes)
		return false;
	memset(bytes + node->capacity, 0, capacity - node->capacity);
	node->bytes = bytes;
	node->capacity = capacity;
	return true;
}

static void memory_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *to, int mask, struct fuse_file_info *fi)
{
	struct node *node = node_of(ino);
	size_t size = (size_t)to->st_size, old;
	struct timespec now;
	bool room = true;

	clock_gettime(CLOCK_REALTIME_COARSE, &now);
	pthread_rwlock_wrlock(&node->lock);
	if (mask & FUSE_SET_ATTR_SIZE && node->fd >= 0) {
		room = !ftruncate(node->fd, to->st_size);
	} else if (mask & FUSE_SET_ATTR_SIZE) {
		old = atomic_load(&node->size);
		room = grow(node, size);
		if (room && size < old)
			memset(node->bytes + size, 0, old - size);
		if (room)
			atomic_store(&node->size, size);
	}
	if (mask & FUSE_SET_ATTR_MODE)
		node->mode = (node->mode & S_IFMT) | (to->st_mode & 07777);
	if (mask & FUSE_SET_ATTR_UID)
		node->uid = to->st_uid;
	if (mask & FUSE_SET_ATTR_GID)
		node->gid = to->st_gid;
	if (mask & FUSE_SET_ATTR_ATIME)
		node->atime = mask & FUSE_SET_ATTR_ATIME_NOW ? now : to->st_atim;
	if (mask & FUSE_SET_ATTR_MTIME)
		node->mtime = mask & FUSE_SET_ATTR_MTIME_NOW ? now : to->st_mtim;
	node->ctime = now;
	pthread_rwlock_unlock(&node->lock);
	if (room)
		memory_getattr(req, ino, fi);
	else
		fuse_reply_err(req, ENOSPC);
}

static void memory_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	if (open_node(req, node_of(ino), fi))
		fuse_reply_open(req, fi);
	else
		fuse_reply_err(req, EIO);
}

static void memory_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *fi)
{
	struct node *node = node_of(ino);
	size_t end, start = (size_t)offset;

	(void)fi;
	pthread_rwlock_rdlock(&node->lock);
	end = atomic_load(&node->size);
	if (start > end)
		start = end;
	fuse_reply_buf(req, node->bytes + start, size < end - start ? size : end - start);
	pthread_rwlock_unlock(&node->lock);
}

/* Takes the lock that a write to this range needs: of readers within the buffer, as such writes may go in parallel. */
static bool lock_for_write(struct node *node, size_t end)
{
	bool room;

	pthread_rwlock_rdlock(&node->lock);
	if (end <= node->capacity && !(node->mode & (S_ISUID | S_ISGID)))
		return true;
	pthread_rwlock_unlock(&node->lock);
	pthread_rwlock_wrlock(&node->lock);
	/* What HANDLE_KILLPRIV_V2 asks of the server. */
	node->mode &= ~(mode_t)(node->mode & S_IXGRP ? S_ISUID | S_ISGID : S_ISUID);
	room = grow(node, end);
	if (!room)
		pthread_rwlock_unlock(&node->lock);
	return room;
}

static void written(struct node *node, size_t end)
{
	size_t size = atomic_load(&node->size);

	while (size < end && !atomic_compare_exchange_weak(&node->size, &size, end))
		;
	pthread_rwlock_unlock(&node->lock);
}

static void memory_write(fuse_req_t req, fuse_ino_t ino, const char *bytes, size_t size, off_t offset,
			 struct fuse_file_info *fi)
{
	struct node *node = node_of(ino);

	(void)fi;
	if (!lock_for_write(node, (size_t)offset + size)) {
		fuse_reply_err(req, ENOSPC);
		return;
	}
	memcpy(node->bytes + offset, bytes, size);
	written(node, (size_t)offset + size);
	fuse_reply_write(req, size);
}

static void memory_write_buf(fuse_req_t req, fuse_ino_t ino, struct fuse_bufvec *from, off_t offset,
			     struct fuse_file_info *fi)
{
	struct node *node = node_of(ino);
	struct fuse_bufvec to = FUSE_BUFVEC_INIT(fuse_buf_size(from));
	size_t end = (size_t)offset + to.buf[0].size;
	ssize_t copied;

	(void)fi;
	if (!lock_for_write(node, end)) {
		fuse_reply_err(req, ENOSPC);
		return;
	}
	to.buf[0].mem = node->bytes + offset;
	copied = fuse_buf_copy(&to, from, 0);
	written(node, copied < 0 ? 0 : (size_t)offset + (size_t)copied);
	if (copied < 0)
		fuse_reply_err(req, (int)-copied);
	else
		fuse_reply_write(req, (size_t)copied);
}

/* Memory is as safe as it will be. */
static void memory_fsync(fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi)
{
	(void)ino;
	(void)datasync;
	(void)fi;
	fuse_reply_err(req, 0);
}

void memory_operations(struct fuse_lowlevel_ops *ops, bool splice, bool passes_through)
{
	passthrough = passes_through;
	for (size_t i = 0; i < LOCKS; i++)
		pthread_mutex_init(&locks[i], NULL);
	ops->lookup = memory_lookup;
	ops->forget = memory_forget;
	ops->forget_multi = memory_forget_multi;
	ops->create = memory_create;
	ops->mkdir = memory_mkdir;
	ops->unlink = memory_unlink;
	ops->rmdir = memory_rmdir;
	ops->getattr = memory_getattr;
	ops->setattr = memory_setattr;
	ops->open = memory_open;
	ops->read = memory_read;
	if (splice)
		ops->write_buf = memory_write_buf;
	else
		ops->write = memory_write;
	ops->fsync = memory_fsync;
}
