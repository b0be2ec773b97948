/* hvl.h: the C API of the horovodlike engine. hvl_parameters.h has the functions for parameter servers; bindings see
 * these two headers and no other.
 *
 * Conventions
 *  1. One engine per process. Every function may be called from any thread unless it says otherwise.
 *  2. A function that can fail returns an hvl_status (or, where it returns a handle, the negated status);
 *     hvl_last_error() then returns the calling thread's message. No C++ exception crosses this interface.
 *  3. The caller owns what it passes. Names, shapes and arrays are copied before a call returns. Tensor memory is
 *     borrowed from hvl_enqueue() until the request completes: it may be neither freed nor written until then.
 *  4. Every accepted request completes exactly once: with success, with an error, or because the job is shut down.
 *  5. A handle is consumed by hvl_wait(), hvl_try_wait(), hvl_take_copy(), hvl_wait_all(), hvl_wait_message(),
 *     hvl_wait_on_stream() or hvl_wait_all_on_stream(). hvl_wait() and hvl_wait_on_stream() hand over outputs that the
 *     engine allocated; the other functions free them.
 *  6. Sizes are in bytes and times in seconds unless the name says otherwise.
 *  7. A request whose device is HVL_CUDA is enqueued with the stream that produces its tensors. It completes when all
 *     its work has been given to the GPU; its results are valid when the GPU has done this work. On the host,
 *     hvl_wait() and hvl_wait_all() wait for valid results; hvl_wait_on_stream() and hvl_wait_all_on_stream() make a
 *     stream wait for them. Tensor memory is borrowed until the results are valid. Each rank has one GPU.
 */
#ifndef HVL_H
#define HVL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

/* cffi:begin */
enum { HVL_ABI_VERSION = 14, HVL_STACK_BYTES = 8064, HVL_KEY_BYTES = 32, HVL_MAX_COPIED_BYTES = 16384 };
enum { HVL_ANY_SOURCE = -1 }; /* in place of a rank, for a receive */
enum { HVL_MESSAGE = -1 };    /* in place of a kind, for hvl_implements(): send and receive */

typedef enum hvl_status {
  HVL_OK = 0,
  HVL_IN_PROGRESS = 1,      /* not complete yet (time-out or interruption of a wait) */
  HVL_INVALID_ARGUMENT = 2, /* this call is wrong, whatever the other ranks do */
  HVL_MISMATCH = 3,         /* this call does not match the other ranks' calls */
  HVL_NOT_INITIALIZED = 4,
  HVL_JOB_BROKEN = 5, /* a peer is lost or stalled: nothing works until the next hvl_init() */
  HVL_SHUT_DOWN = 6,  /* a rank has shut the job down */
  HVL_RESOURCES = 7,  /* memory or another resource of this process ran out */
  HVL_UNKNOWN_HANDLE = 8
} hvl_status;

typedef enum hvl_kind {
  HVL_ALLREDUCE = 0,
  HVL_ALLGATHER = 1,
  HVL_BROADCAST = 2,
  HVL_BARRIER = 3,
  HVL_REDUCESCATTER = 4,
  HVL_ALLTOALL = 5,
  HVL_JOIN = 6,
  HVL_ADD_PROCESS_SET = 7,
  HVL_REMOVE_PROCESS_SET = 8,
  HVL_GATHER = 9,
  HVL_SCATTER = 10,
  HVL_REDUCE = 11
} hvl_kind;

/* The values are Horovod's, which scripts use as integers. */
typedef enum hvl_reduce_op {
  HVL_AVERAGE = 0,
  HVL_SUM = 1,
  HVL_ADASUM = 2,
  HVL_MIN = 3,
  HVL_MAX = 4,
  HVL_PRODUCT = 5
} hvl_reduce_op;

typedef enum hvl_dtype {
  HVL_UINT8 = 0,
  HVL_INT8 = 1,
  HVL_UINT16 = 2,
  HVL_INT16 = 3,
  HVL_INT32 = 4,
  HVL_INT64 = 5,
  HVL_FLOAT16 = 6,
  HVL_FLOAT32 = 7,
  HVL_FLOAT64 = 8,
  HVL_BOOL = 9,
  HVL_BFLOAT16 = 10,
  HVL_FLOAT8_E4M3FN = 11, /* no infinity: a number out of range becomes the largest one */
  HVL_FLOAT8_E5M2 = 12
} hvl_dtype;

typedef enum hvl_device { HVL_CPU = 0, HVL_CUDA = 1 } hvl_device;

/* The path of the data of tensors on GPUs. */
typedef enum hvl_gpu_operations {
  HVL_GPU_AUTO = 0,   /* NCCL if all ranks of a process set have it and a GPU of their own; else as HVL_GPU_STAGING */
  HVL_GPU_NCCL = 1,   /* NCCL; the job breaks if the ranks cannot use it. Still staged: reductions that NCCL does not
                       * have, and collectives in which some ranks of the process set do not take part */
  HVL_GPU_STAGING = 2 /* copied to the host, moved as tensors of the CPU are, and copied back */
} hvl_gpu_operations;

/* The ways for the bytes of tensors and messages. */
typedef enum hvl_transport {
  HVL_BY_ENGINE = 0,     /* CPU: shared memory and TCP; GPU: as hvl_gpu_operations says */
  HVL_SHARED_MEMORY = 1, /* within a host */
  HVL_TCP = 2,           /* between hosts */
  HVL_EXTERNAL = 3,      /* the functions of hvl_external, such as MPI's */
  HVL_NCCL = 4,
  HVL_STAGING = 5 /* copied to the host, moved as tensors of the CPU are, and copied back */
} hvl_transport;

/* A rule that chooses the transport of operations of one kind that are smaller than `below` bytes. The size counts
 * the tensors of a request together: of an allgather and a gather, of the result; of an alltoall, of what all ranks
 * send; of a scatter, of one part. */
typedef struct hvl_route {
  int32_t device;    /* hvl_device */
  int32_t kind;      /* hvl_kind */
  int64_t below;     /* greater than 0 */
  int32_t transport; /* hvl_transport: HVL_BY_ENGINE, HVL_EXTERNAL or HVL_STAGING */
} hvl_route;

/* The order of a tensor's elements in memory. */
typedef enum hvl_memory_format {
  HVL_ROW_MAJOR = 0,
  HVL_CHANNELS_LAST = 1, /* as if dimension 1 were the last one; at least three dimensions */
  HVL_COLUMN_MAJOR = 2   /* as if the dimensions were in reverse order; at least two dimensions */
} hvl_memory_format;

/* Shape and dtype of one tensor, whose elements lie in memory without gaps. */
typedef struct hvl_tensor {
  const int64_t* shape;
  int32_t ndim;
  int32_t dtype; /* hvl_dtype */
} hvl_tensor;

/* One operation on one tensor, or on a group that is executed as a whole or not at all. The tensors of a group may
 * differ in shape and dtype. */
typedef struct hvl_request {
  const char* name; /* equal on all ranks; unique among requests in flight on the process set, but for a sequence */
  const hvl_tensor* tensors;
  int32_t num_tensors;
  int32_t kind;      /* hvl_kind */
  int32_t reduce_op; /* hvl_reduce_op, for an allreduce, reducescatter or reduce; else HVL_SUM */
  /* Broadcast, gather, scatter, reduce: a global rank, the same on all ranks. HVL_ADD_PROCESS_SET: the lowest rank of
   * the set if only its ranks make the request, and -1 if all ranks of the job do. Else -1. */
  int32_t root_rank;
  int32_t process_set;
  int32_t device; /* hvl_device */
  double prescale;
  double postscale;
  /* Allreduce: the hvl_memory_format of each tensor, the same on all ranks; or none, if all are row-major. Alltoall:
   * for each tensor, the number of rows to send to each member of the process set, by ascending rank.
   * HVL_ADD_PROCESS_SET: the ranks, ascending. HVL_REMOVE_PROCESS_SET: the id. Else none. */
  const int64_t* arguments;
  int32_t num_arguments;
  /* 0: none. Requests of one sequence are announced to the other ranks in the order in which they are enqueued. One
   * whose name is in flight is not refused: it waits for the name, and those behind it wait, too. If the ranks disagree
   * about one, all later ones of the sequence fail with HVL_MISMATCH when they complete: continue with another
   * sequence. */
  int32_t sequence;
} hvl_request;

/* A request checked once, to be enqueued any number of times, also after another hvl_init(). */
typedef struct hvl_prepared hvl_prepared;

/* An output that the engine allocated; free it with hvl_free(data). */
typedef struct hvl_output {
  void* data;
  int64_t num_bytes;
  int64_t shape[8];
  int32_t ndim;
  int32_t dtype;
} hvl_output;

/* Functions that the engine calls for a request: `done` in place of a wait, `allocate` for its outputs. The caller is
 * the engine's thread or a thread that waits for a request. They may neither wait nor call hvl_shutdown(). */
typedef struct hvl_callbacks {
  /* Called once, when the request completes; such a request has no handle. `message` is valid during the call only.
   * With HVL_CUDA, the stream of the request already waits for the results. Null: the request has a handle. */
  void (*done)(void* context, int32_t status, const char* message);
  /* Returns memory for the output of this index, or null if there is none, which breaks the job. All fields of `output`
   * but `data` are set. The caller owns the memory, and hvl_wait() does not return it. Null in place of the function:
   * the engine allocates. It cannot allocate GPU memory, so requests with HVL_CUDA need the function: it returns memory
   * on the GPU, which the stream of the request may still use; but memory on the host for the received rows of an
   * alltoall (outputs of odd index). */
  void* (*allocate)(void* context, int32_t index, const hvl_output* output);
  void* context;
} hvl_callbacks;

/* For hvl_callbacks.allocate: puts the outputs into memory of the caller. `context`: an array with an hvl_output for
 * each output; its `data` has room for exactly `num_bytes`. If an output has another size, the function allocates
 * memory for it and overwrites its hvl_output; the caller must then free the new `data` with hvl_free(). Not for
 * HVL_CUDA: the memory is on the host. */
void* hvl_place_output(void* context, int32_t index, const hvl_output* output);

typedef enum hvl_use { HVL_CONTROL = 0, HVL_DATA = 1, HVL_MESSAGES = 2 } hvl_use;

/* A TCP connection to a rank of another host. Both sides are authenticated, and nothing has been sent after that. The
 * keys are for the MACs of the two directions. A data connection uses them only if data is sealed. If data is not
 * sealed, a connection for messages uses them for its headers. */
typedef struct hvl_connection {
  int32_t fd;
  int32_t rank;
  int32_t use; /* hvl_use */
  uint8_t send_key[32];
  uint8_t receive_key[32];
} hvl_connection;

/* The ranks that take part in a collective. */
typedef struct hvl_team {
  const int32_t* ranks; /* of the job, ascending */
  int32_t size;         /* 2 at least */
  int32_t mine;         /* the index of this rank in `ranks` */
} hvl_team;

/* A library such as MPI that moves the data of collectives in place of the engine's own transports.
 *
 * All functions are called by the engine's thread, one at a time, on all members of a team in the same order. The first
 * five begin a collective and return HVL_OK if it is done, HVL_IN_PROGRESS if test() must be called until it is, and
 * anything else if it failed, which breaks the job. The team and the arrays of numbers are valid during the call,
 * memory of tensors until the collective is done. Blocks are contiguous, in the order of the team's members, and may be
 * empty. All counts, and all offsets computed from them, are less than 2^31. */
typedef struct hvl_external {
  void* context;
  /* Adds up elements of HVL_FLOAT32 or HVL_FLOAT64. `sent` may be `received`. All members get the same result. */
  int32_t (*allreduce)(void* context, const hvl_team* team, const void* sent, void* received, int64_t count,
                       int32_t dtype);
  /* Like allreduce, but each member receives only its block of the result. `counts`: the elements of each block. */
  int32_t (*reducescatter)(void* context, const hvl_team* team, const void* sent, void* received, const int64_t* counts,
                           int32_t dtype);
  /* root: the root's place in the team. */
  int32_t (*broadcast)(void* context, const hvl_team* team, void* data, int64_t num_bytes, int32_t root);
  /* `sent` may be this rank's block in `received`. */
  int32_t (*allgatherv)(void* context, const hvl_team* team, const void* sent, void* received,
                        const int64_t* num_bytes);
  int32_t (*alltoallv)(void* context, const hvl_team* team, const void* sent, const int64_t* bytes_sent, void* received,
                       const int64_t* bytes_received);
  int32_t (*test)(void* context);
  /* The reason why the last call failed; the text is valid until the next call. */
  const char* (*error)(void* context);
  /* Called when the job is broken, even if a collective is in progress. No other function is called afterwards. */
  void (*broken)(void* context, const char* why);
} hvl_external;

typedef struct hvl_config {
  int32_t abi_version; /* HVL_ABI_VERSION */
  int32_t rank, size;
  int32_t local_rank, local_size;
  int32_t cross_rank, cross_size;
  /* Jobs of several hosts: the host number of each rank. Hosts are numbered in the order of their lowest ranks, so rank
   * 0 is on host 0; local ranks are in the order of ranks. Null: all ranks are on one host. */
  const int32_t* hosts;
  const char* const* host_names; /* by host number, for messages */
  /* Hosts form a tree: the parent of host h > 0 is host (h - 1) / fan_out. Local rank 0 of a host has a control
   * connection to local rank 0 of the parent and of each child. */
  int32_t fan_out;
  /* For each rank of another host: one or several data connections, the same number in the same order on both sides,
   * and one connection for messages. Also the control connections. The engine uses duplicates of the descriptors. */
  const hvl_connection* connections;
  int32_t num_connections;
  /* Jobs of several hosts: each rank is woken through a non-blocking pipe. The read end of this rank's pipe, and the
   * write ends of all pipes of this host, by local rank. The engine uses duplicates. */
  int32_t wakeup_fd;
  const int32_t* wakeup_fds;
  int32_t seal_data;          /* 1: data and messages between hosts have MACs; the same on all ranks */
  int32_t segment_fd;         /* this host's shared memory, hvl_segment_bytes() long, zeroed; -1 if local_size is 1 */
  int32_t processors;         /* available to this host's ranks together */
  const int32_t* local_pids;  /* process ids of this host's ranks, by local rank */
  int64_t slot_bytes;         /* one slot of shared memory */
  int32_t slot_depth;         /* slots per rank */
  int64_t fusion_threshold;   /* bytes of one batch at most; 0 turns fusion off */
  double cycle_time;          /* seconds to wait for more requests when no thread waits for a result */
  int32_t overlap;            /* 0: requests are deferred until some rank waits for a result, see config.py */
  int32_t cache_capacity;     /* tensors in the response cache at most */
  double stall_warning_time;  /* seconds; 0 turns the warning off */
  double stall_shutdown_time; /* seconds; 0 means never */
  /* The divisor of Average. 1: the size of the process set, even if ranks have joined; 0: the participating ranks. */
  int32_t average_counts_joined;
  int32_t hierarchical_adasum;        /* 1: Adasum combines the averages of hosts */
  int32_t flight_recorder_size;       /* collectives that the flight recorder keeps */
  const char* flight_recorder_folder; /* for the records when the job breaks; null or empty: they are not written */
  int32_t autotune;                   /* 1: each of the next two settings is tuned if its field is 1 */
  int32_t autotune_fusion_threshold;
  int32_t autotune_cycle_time;
  int32_t autotune_warmup_samples;   /* samples at the start that are ignored */
  int32_t autotune_steps_per_sample; /* training steps */
  const char* autotune_log;          /* a CSV file that rank 0 writes; null or empty: none */
  const hvl_external* external;      /* copied; `context` outlives the engine. Null: the engine's own transports */
  int32_t gpu_operations;            /* hvl_gpu_operations */
  int64_t gpu_staging_bytes;         /* copied between host and GPU at once; a multiple of 64, the same on all ranks */
  const char* cuda_library;          /* the file of libcuda.so.1; null or empty: the loader looks for it */
  const char* nccl_library;          /* the file of libnccl.so.2; likewise */
  /* The first rule that fits an operation counts, and HVL_BY_ENGINE where none does; the same on all ranks. If no rule
   * names HVL_EXTERNAL and `external` is not null, that moves the data of all collectives of the CPU. */
  const hvl_route* routes;
  int32_t num_routes;
  int32_t log_level; /* 0 trace, 1 debug, 2 info, 3 warning, 4 error, 5 fatal */
} hvl_config;

/* The GPU libraries that this process finds. */
typedef struct hvl_gpu_libraries {
  int32_t cuda_version; /* of the driver: 12040 for 12.4; 0: CUDA cannot be used, see why_no_cuda */
  int32_t nccl_version; /* 21903 for 2.19.3; 0: NCCL cannot be used, see why_no_nccl */
  int32_t num_gpus;     /* visible to this process; 0 if they were not counted */
  char why_no_cuda[256];
  char why_no_nccl[256];
} hvl_gpu_libraries;

typedef struct hvl_counters {
  int64_t batches;
  int64_t requests;
  int64_t bytes;
  int64_t negotiated_in_full; /* requests that were not in the response cache */
  int64_t segment_bytes;      /* shared memory of this host divided by its ranks */
  int64_t executed;           /* requests that were part of a batch: not failed ones, joins, changes of process sets */
  int64_t negotiation_ns;     /* sum over all executed requests: from enqueue to the start of the batch */
  int64_t execution_ns;       /* sum over all batches */
  int64_t waiting_ns;         /* in which a request waited and no batch was executed, up to now */
  int64_t communicating_ns;   /* in which a batch was executed, up to now */
  int64_t peer_wait_ns;       /* the part of execution_ns spent waiting for other ranks, or for copies from the GPU */
  int64_t ranks;              /* of the job; 0 if there is no engine */
  int64_t blocked_ns; /* sum over threads: blocked until requests were complete; or requests with `done` in flight */
  int64_t in_flight;  /* requests that are enqueued and not complete; or, if more, threads that wait for results */
  /* Bytes of the tensors in completed batches, by transport. A batch of several hosts counts as TCP, one of a single
   * host as shared memory, unless another library carries it. Batches of a single rank are not counted. */
  int64_t bytes_by_shared_memory;
  int64_t bytes_by_tcp;
  int64_t bytes_by_external;
  int64_t bytes_by_nccl;
  int64_t bytes_by_staging;
} hvl_counters;

/* The waits of the other ranks for one rank, while it was the last to have a tensor ready. */
typedef struct hvl_straggler_stats {
  int64_t times;     /* waits of a millisecond or more */
  int64_t waited_ns; /* from when the first rank was ready; simultaneous waits count once */
} hvl_straggler_stats;

/* Injected faults, for tests of their effect on the other ranks: the point in the engine, and the kind of fault. */
typedef enum hvl_fault_point {
  HVL_FAULT_IN_NEGOTIATION = 0, /* a request has been sent, and not been answered */
  HVL_FAULT_IN_DATA = 1         /* in an allreduce, before the second half of its data is read: no rank completes it */
} hvl_fault_point;

typedef enum hvl_fault {
  HVL_FAULT_RAISE = 0,  /* the engine fails, which breaks the job */
  HVL_FAULT_SIGNAL = 1, /* the process receives a signal */
  HVL_FAULT_CLOSE = 2,  /* all TCP connections of the process are shut down */
  HVL_FAULT_SLOW = 3    /* the engine pauses for some time */
} hvl_fault;

/* 1 if the engine has this transport for this hvl_kind or HVL_MESSAGE, on this hvl_device; else 0. */
int32_t hvl_implements(int32_t transport, int32_t kind, int32_t device);
int64_t hvl_segment_bytes(const hvl_config* config);
int32_t hvl_init(const hvl_config* config);
/* Ends the job on all ranks; returns when this rank's engine thread has ended. Does nothing if not initialised.
 * `reason` becomes part of the error of the other ranks; "": none. */
int32_t hvl_shutdown(const char* reason);
int32_t hvl_is_initialized(void);
/* HVL_OK while requests are accepted; else the error that enqueueing one would return: HVL_JOB_BROKEN, HVL_SHUT_DOWN or
 * HVL_NOT_INITIALIZED. */
int32_t hvl_job_status(void);

/* Checks a request as far as one rank can, before or after hvl_init(). Null: see hvl_last_error(). */
hvl_prepared* hvl_prepare(const hvl_request* request);
/* Frees the prepared request. Requests in flight do not need it any more. */
void hvl_release(hvl_prepared* prepared);

/* Enqueues a request. `inputs` and `outputs`: the addresses of the memory of its tensors, num_tensors of each.
 * inputs[i] may equal outputs[i].
 *
 * Allgather, gather and alltoall: `outputs` is null; the engine allocates the outputs, and hvl_wait() hands them over.
 * An alltoall has two outputs for each tensor: the data, then the rows received from each member (int32). The outputs
 * of a gather have no rows, except on the root. A join and the addition of a process set have no tensors; the engine
 * allocates their output, one int64: the rank that joined last, or the id of the set. Broadcast: the root's inputs are
 * sent and every rank's outputs are written. Reduce: only the root's outputs are written, and only they need an
 * address. Reducescatter: dimension 0 is split into a part for each member of the process set; the first (extent modulo
 * members) parts have one row more. An output holds this rank's part, and must not be an input. Scatter: each rank
 * gives the shape of one part; the root's input holds the parts of all members of the process set, one after the other,
 * and only the root's input needs an address; an output holds this rank's part, and must not be an input.
 *
 * `callbacks` may be null. Returns a handle > 0, or 0 if callbacks->done is set. An error is a negated hvl_status, and
 * no callback is called then. Does not block. */
int64_t hvl_enqueue(hvl_prepared* prepared, const uintptr_t* inputs, const uintptr_t* outputs,
                    const hvl_callbacks* callbacks);
/* hvl_enqueue() for one tensor that is both input and output. */
int64_t hvl_enqueue_inplace(hvl_prepared* prepared, uintptr_t data);
/* The same on a copy that the engine makes of the tensor, which must be on the CPU and have at most
 * HVL_MAX_COPIED_BYTES. `data` is not used after the call; hvl_take_copy() returns the result. */
int64_t hvl_enqueue_copied(hvl_prepared* prepared, uintptr_t data);
/* hvl_enqueue_inplace() for many requests; writes their handles. Returns an hvl_status: if one is rejected, it and
 * those after it are not enqueued, and their handles are 0. */
int32_t hvl_enqueue_all(hvl_prepared* const* prepared, const uintptr_t* data, int32_t count, int64_t* handles);
/* The handle from this thread's last call that enqueued one request or message; 0: rejected, or without a handle. */
int64_t hvl_last_handle(void);
/* The handle of the request in flight under the name of `prepared`; 0: there is none, or it has no handle. */
int64_t hvl_handle_in_flight(hvl_prepared* prepared);
/* hvl_enqueue() and hvl_enqueue_all() for requests with HVL_CUDA. `stream`: a CUstream of GPU `device`, in the driver's
 * numbering. The GPU begins a request after all work that `stream` has been given so far. Rejected while `stream` is
 * being captured, and for CU_STREAM_PER_THREAD. */
int64_t hvl_enqueue_on_stream(hvl_prepared* prepared, const uintptr_t* inputs, const uintptr_t* outputs,
                              const hvl_callbacks* callbacks, int32_t device, void* stream);
int32_t hvl_enqueue_all_on_stream(hvl_prepared* const* prepared, const uintptr_t* data, int32_t count, int64_t* handles,
                                  int32_t device, void* stream);
/* 1 complete, 0 not complete, or a negated hvl_status. */
int32_t hvl_poll(int64_t handle);
/* Waits up to `timeout` seconds. HVL_IN_PROGRESS: not complete, the handle stays valid. Anything else consumes the
 * handle. `*outputs` becomes an array of `*num_outputs` outputs, null unless the engine allocated some; the array is to
 * be freed with hvl_free(), and so is the data of each. Both pointers may be null: then the outputs are freed. */
int32_t hvl_wait(int64_t handle, double timeout, hvl_output** outputs, int32_t* num_outputs);
/* As hvl_wait(), but never waits, and frees the outputs: HVL_IN_PROGRESS if the result is not there yet. */
int32_t hvl_try_wait(int64_t handle);
/* Waits up to `timeout` seconds, and consumes nothing: HVL_OK if the request is complete, failed or not. */
int32_t hvl_wait_until_complete(int64_t handle, double timeout);
/* As hvl_try_wait(), for a handle of hvl_enqueue_copied(): with HVL_OK, the result has been copied to `result`. */
int32_t hvl_take_copy(int64_t handle, uintptr_t result);
/* Waits for all requests, then consumes all handles and overwrites them with 0. Returns the first error in order.
 * Consumes none if it returns HVL_IN_PROGRESS. Skips handles of 0. */
int32_t hvl_wait_all(int64_t* handles, int32_t count, double timeout);
/* As hvl_wait() and hvl_wait_all(), but for results on a GPU the host waits only until the requests are complete: work
 * that `stream` is given later runs after the results are valid. While `stream` is being captured, the call fails
 * (HVL_INVALID_ARGUMENT) and consumes nothing. If the GPU cannot make `stream` wait, the host waits until the results
 * are valid, and the call returns an error (HVL_RESOURCES). */
int32_t hvl_wait_on_stream(int64_t handle, double timeout, hvl_output** outputs, int32_t* num_outputs, void* stream);
int32_t hvl_wait_all_on_stream(int64_t* handles, int32_t count, double timeout, void* stream);
void hvl_free(void* data);

/* The source and size of the message that a receive has got. */
typedef struct hvl_received {
  int32_t source; /* global rank */
  int64_t num_bytes;
} hvl_received;

/* Send or receive a message in CPU memory; a rank may send to itself. `peer`: the global rank of the other side, or
 * HVL_ANY_SOURCE for a receive. `tag`: 0 or more. `process_set`: the id of a set that has both ranks. A receive gets
 * the first message that the peer has sent with this tag and process set and that no other receive has got; with
 * HVL_ANY_SOURCE, the first that has arrived. If the message has another size or dtype, the receive fails
 * (HVL_MISMATCH) and the send does not. Both return a handle, as hvl_enqueue() does, and do not block. A receive
 * completes when the message is in its memory. A send completes when its memory is not needed any more: for a large
 * message, when it has been received. */
int64_t hvl_send(uintptr_t data, int64_t num_bytes, int32_t dtype, int32_t peer, int64_t tag, int32_t process_set);
int64_t hvl_receive(uintptr_t data, int64_t num_bytes, int32_t dtype, int32_t peer, int64_t tag, int32_t process_set);
/* As hvl_wait(), for a handle of hvl_receive(); writes `*received` if the status is HVL_OK. */
int32_t hvl_wait_message(int64_t handle, double timeout, hvl_received* received);

/* Stack-dump requests. Blocks until the coordinator sends one, as other ranks have waited long for this rank, and
 * returns its number. Answer it with a text of up to HVL_STACK_BYTES for the report. 0: the job has ended. */
int64_t hvl_await_stack_request(void);
void hvl_answer_stack_request(int64_t request, const char* text);

const char* hvl_last_error(void);
void hvl_get_counters(hvl_counters* counters);
/* Writes what the coordinator has measured for ranks 0 to count - 1. Only host 0 has this, for its own ranks: zeros for
 * all others. */
void hvl_get_straggler_stats(hvl_straggler_stats* stats, int32_t count);
/* The last collectives of this rank as a JSON array, to be freed with hvl_free(); null if there is no engine. */
char* hvl_get_collective_records(void);
/* Returns at most `most` records with numbers above *after, and sets *after to the last one's; by CLOCK_MONOTONIC.
 * A sample for which all ranks choose alike: those before which none was executed for a millisecond, and few others. */
char* hvl_sample_collectives(uint64_t* after, int32_t most);
/* Begins to write this rank's collectives to a file of trace events; ends the previous timeline, if there is one. If
 * `mark_cycles` is not 0, also marks the start of each batch. */
int32_t hvl_start_timeline(const char* path, int32_t mark_cycles);
/* Ends the timeline, and returns when its file is complete. Does nothing without one. hvl_shutdown() ends it, too. */
void hvl_stop_timeline(void);
/* A second timeline, independent of the first: for a profile of some steps. */
int32_t hvl_start_profile_timeline(const char* path);
void hvl_stop_profile_timeline(void);
/* Arms a fault: the engine injects it once, when it next reaches this point. `amount`: the number of the signal, or
 * seconds. The fault is lost when the engine ends; a second one at the same point replaces it. */
int32_t hvl_arm_fault(int32_t point, int32_t fault, double amount);
/* Does at once what HVL_FAULT_CLOSE does; needs no engine. */
int32_t hvl_cut_connections(void);
/* Opens the GPU libraries, with files as in hvl_config; needs no engine. If `counts_gpus` is not 0, it initialises
 * CUDA: a process that is forked later cannot use CUDA then. Else num_gpus is 0. A missing library is not an error:
 * `found` has the reason. */
int32_t hvl_find_gpu_libraries(const char* cuda_library, const char* nccl_library, int32_t counts_gpus,
                               hvl_gpu_libraries* found);

const char* hvl_version(void);
/* cffi:end */

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif /* HVL_H */
