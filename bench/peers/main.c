/*
 * A libfuse server to compare Ferry with.
 *
 *   fuse-peer null|memory MOUNTPOINT [splice] [uring] [passthrough] [threads=N]
 *   fuse-peer version
 *
 * It stays in the foreground and unmounts at SIGTERM or SIGINT. README.md says why it is set up as it is.
 */

#include "peer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/*
 * Threads that may wait for requests: as many as there are clients at most, so that no request waits for one, and two for
 * what comes beside them.
 */
#define THREADS 10

static bool splice, passthrough;

/* Sets what makes libfuse fast, and takes back what it sets by itself and costs time here. */
static void peer_init(void *data, struct fuse_conn_info *conn)
{
	const uint64_t splices[] = { FUSE_CAP_SPLICE_READ, FUSE_CAP_SPLICE_WRITE, FUSE_CAP_SPLICE_MOVE };

	(void)data;
	for (size_t i = 0; i < sizeof(splices) / sizeof(*splices); i++) {
		if (splice)
			fuse_set_feature_flag(conn, splices[i]);
		else
			fuse_unset_feature_flag(conn, splices[i]);
	}
	/* Without it, the kernel asks for security.capability before each write. */
	fuse_unset_feature_flag(conn, FUSE_CAP_HANDLE_KILLPRIV);
	fuse_set_feature_flag(conn, FUSE_CAP_HANDLE_KILLPRIV_V2);
	fuse_set_feature_flag(conn, FUSE_CAP_PARALLEL_DIROPS);
	fuse_set_feature_flag(conn, FUSE_CAP_ASYNC_DIO);
	/* The backing files are memfds, which are stacked on nothing: the depth stays 0. */
	if (passthrough && !fuse_set_feature_flag(conn, FUSE_CAP_PASSTHROUGH))
		fputs("fuse-peer: the kernel has no passthrough\n", stderr);
	/* No handler waits, so none need be interruptible: this spares a lock and a list for each request. */
	conn->no_interrupt = 1;
}

static int usage(void)
{
	fputs("usage: fuse-peer null|memory MOUNTPOINT [splice] [uring] [passthrough] [threads=N]\n", stderr);
	return 2;
}

/* The loop with a descriptor of its own for each thread. */
static int serve(struct fuse_session *session, unsigned int threads)
{
	struct fuse_loop_config *config = fuse_loop_cfg_create();
	int status;

	if (!config)
		return 1;
	fuse_loop_cfg_set_clone_fd(config, 1);
	fuse_loop_cfg_set_max_threads(config, threads);
	/* Threads are kept: making one costs more than a request. */
	fuse_loop_cfg_set_idle_threads(config, threads);
	status = fuse_session_loop_mt(session, config);
	fuse_loop_cfg_destroy(config);
	return status;
}

int main(int argc, char **argv)
{
	struct fuse_args args = FUSE_ARGS_INIT(0, NULL);
	struct fuse_lowlevel_ops ops = { .init = peer_init };
	struct fuse_session *session;
	unsigned int threads = THREADS;
	bool uring = false;
	int status = 1;

	if (argc == 2 && !strcmp(argv[1], "version")) {
		printf("libfuse %s\n", fuse_pkgversion());
		return 0;
	}
	if (argc < 3)
		return usage();
	for (int i = 3; i < argc; i++) {
		if (!strcmp(argv[i], "splice"))
			splice = true;
		else if (!strcmp(argv[i], "uring"))
			uring = true;
		else if (!strcmp(argv[i], "passthrough"))
			passthrough = true;
		else if (sscanf(argv[i], "threads=%u", &threads) != 1 || threads == 0)
			return usage();
	}
	/* The null file system has no files to pass through to. */
	if (!strcmp(argv[1], "null") && !passthrough)
		null_operations(&ops, splice);
	else if (!strcmp(argv[1], "memory"))
		memory_operations(&ops, splice, passthrough);
	else
		return usage();

	if (fuse_opt_add_arg(&args, argv[0]) || fuse_opt_add_arg(&args, "-odefault_permissions,allow_other") ||
	    (uring && fuse_opt_add_arg(&args, "-oio_uring")))
		return 1;
	session = fuse_session_new(&args, &ops, sizeof(ops), NULL);
	if (!session) {
		fputs("fuse-peer: libfuse refuses these options\n", stderr);
		goto out_args;
	}
	if (fuse_set_signal_handlers(session))
		goto out_session;
	if (fuse_session_mount(session, argv[2]))
		goto out_signals;
	status = serve(session, threads) ? 1 : 0;
	fuse_session_unmount(session);
out_signals:
	fuse_remove_signal_handlers(session);
out_session:
	fuse_session_destroy(session);
out_args:
	fuse_opt_free_args(&args);
	return status;
}
