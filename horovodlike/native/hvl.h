/* hvl.h: the C API of the horovodlike engine; the only header that bindings see.
 *
 * Conventions
 *  1. One engine per process. Every function may be called from any thread unless it says otherwise.
 *  2. A function that can fail returns an hvl_status (or, where it returns a handle, the negated status);
 *     hvl_last_error() then gives the text for the calling thread. No C++ exception crosses this interface.
 *  3. The caller owns what it passes. Names, shapes and arrays are copied before a call returns. Tensor memory is
 *     borrowed from hvl_enqueue() until the request completes: it may be neither freed nor written until then.
 *  4. Every accepted request completes exactly once: success, error, or shut-down.
 *  5. A handle is consumed by hvl_wait(), hvl_try_wait(), hvl_wait_all(), hvl_wait_message(), hvl_wait_on_stream() or
 *     hvl_wait_all_on_stream(). Outputs that the engine allocated are handed over there.
 *  6. Sizes are in bytes and times in seconds unless the name says otherwise.
 *  7. Requests whose device is HVL_CUDA are enqueued with the stream on which their tensors are made. They complete
 *     when all their work has been given to the GPU, and their results are valid when the GPU has done it: hvl_wait()
 *     and its like wait for that on the host, hvl_wait_on_stream() makes a stream wait for it. Tensor memory is
 *     borrowed until then. Each rank has one GPU.
 */
#ifndef HVL_H
#define HVL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

/* cffi:begin */
enum { HVL_ABI_VERSION = 10, HVL_STACK_BYTES = 8064, HVL_KEY_BYTES = 32, HVL_MAX_COPIED_BYTES = 16384 };
enum { HVL_ANY_SOURCE = -1 }; /* in place of a rank, for a receive */

typedef enum hvl_status {
  HVL_OK = 0,
  HVL_IN_PROGRESS = 1,      /* not complete yet (time-out or interruption of a wait) */
  HVL_INVALID_ARGUMENT = 2, /* this call is wrong, found on this rank alone */
  HVL_MISMATCH = 3,         /* this call is wrong: the ranks do not agree */
  HVL_NOT_INITIALIZED = 4,
  HVL_JOB_BROKEN = 5, /* a peer is lost or stalled: nothing works until the next init */
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
  HVL_FLOAT8_E4M3FN = 11, /* no infinity: what is out of range becomes the largest number */
  HVL_FLOAT8_E5M2 = 12
} hvl_dtype;

typedef enum hvl_device { HVL_CPU = 0, HVL_CUDA = 1 } hvl_device;

/* How the data of tensors on GPUs is moved. */
typedef enum hvl_gpu_operations {
  HVL_GPU_AUTO = 0,   /* NCCL if all ranks of a process set have it and a GPU of their own; else as HVL_GPU_STAGING */
  HVL_GPU_NCCL = 1,   /* the same, but it breaks the job if the ranks cannot use NCCL. Reductions that NCCL does not
                       * have, and collectives without some ranks of the process set, are staged nevertheless */
  HVL_GPU_STAGING = 2 /* copied to the host, moved as tensors of the CPU are, and copied back */
} hvl_gpu_operations;

/* The order of a tensor's elements in memory. */
typedef enum hvl_memory_format {
  HVL_ROW_MAJOR = 0,
  HVL_CHANNELS_LAST = 1, /* as if dimension 1 were the last; of at least three dimensions */
  HVL_COLUMN_MAJOR = 2   /* as if the dimensions were in the opposite order; of at least two */
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
  const char* name; /* equal on all ranks; unique in flight on this rank and process set, unless it `follows` */
  const hvl_tensor* tensors;
  int32_t num_tensors;
  int32_t kind;      /* hvl_kind */
  int32_t reduce_op; /* hvl_reduce_op; allreduce, reducescatter, reduce; else HVL_SUM */
  /* Broadcast, gather, scatter, reduce: a global rank, the same on all ranks. HVL_ADD_PROCESS_SET: the lowest rank of
   * the set if only its ranks make the request, and -1 if all ranks of the job do. Else -1. */
  int32_t root_rank;
  int32_t process_set;
  int32_t device; /* hvl_device */
  double prescale;
  double postscale;
  /* Allreduce: the hvl_memory_format of each tensor, which must be the same on all ranks; or none, if all are
   * row-major. Alltoall: of each tensor, the rows for each member of the process set, in their order.
   * HVL_ADD_PROCESS_SET: the ranks, ascending. HVL_REMOVE_PROCESS_SET: the id. Else none. */
  const int64_t* arguments;
  int32_t num_arguments;
  /* 1: where requests are in flight under the name, this one follows them: it is announced to the other ranks when they
   * are complete. 0: it is refused. */
  int32_t follows;
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

/* Functions that a request calls instead of, or during, a wait for it. They are called by the engine's thread or by a
 * thread that waits for another request, and may neither wait nor call hvl_shutdown(). */
typedef struct hvl_callbacks {
  /* Called once, when the request completes; there is no handle then. The message lives as long as the call. Null: the
   * request has a handle. With HVL_CUDA the stream of the request has been told to wait for the results. */
  void (*done)(void* context, int32_t status, const char* message);
  /* Allocates outputs for the engine: returns memory for one of them, of which all but `data` is known, or null if
   * there is none, which breaks the job. The memory stays the caller's, and hvl_wait() does not return it. Null: the
   * engine allocates. The engine cannot allocate GPU memory: requests with HVL_CUDA need this. The memory for them must
   * be on the GPU, and may be in use by the stream of the request; but the rows received of an alltoall (outputs of odd
   * index) are on the host. */
  void* (*allocate)(void* context, int32_t index, const hvl_output* output);
  void* context;
} hvl_callbacks;

/* For hvl_callbacks.allocate: the outputs go to memory that the caller has. `context` is an array with an hvl_output
 * for each of them, whose `data` has room for exactly `num_bytes`. Where an output has another size, it gets memory of
 * its own, and its hvl_output is overwritten by it: its `data` is then to be freed with hvl_free(). Not for HVL_CUDA,
 * as that memory is the host's. */
void* hvl_place_output(void* context, int32_t index, const hvl_output* output);

typedef enum hvl_use { HVL_CONTROL = 0, HVL_DATA = 1, HVL_MESSAGES = 2 } hvl_use;

/* A TCP connection to a rank of another host, on which both sides are authenticated and nothing has been sent
 * since. The keys are for the MACs of the two directions; a data connection uses them if it is sealed. A
 * connection for messages that is not sealed uses them for its headers. */
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
  int32_t mine;         /* this rank's place among them */
} hvl_team;

/* A library such as MPI that moves the data of collectives in place of the engine's own transports.
 *
 * All functions are called by the engine's thread, one at a time, on all members of a team in the same order. The first
 * five begin a collective and return HVL_OK if it is done, HVL_IN_PROGRESS if test() must be called until it is,
 * and anything else if it failed, which breaks the job. The team and the arrays of numbers live as long as the call,
 * memory of tensors until the collective is done. Blocks stand one after the other, by their members' places in the
 * team, and may be empty. No count, and no offset that follows from counts, reaches 2^31. */
typedef struct hvl_external {
  void* context;
  /* Adds up elements of HVL_FLOAT32 or HVL_FLOAT64. `sent` may be `received`. All members get the same numbers. */
  int32_t (*allreduce)(void* context, const hvl_team* team, const void* sent, void* received, int64_t count,
                       int32_t dtype);
  /* The same, but each member gets only its block: `counts` of elements. */
  int32_t (*reducescatter)(void* context, const hvl_team* team, const void* sent, void* received, const int64_t* counts,
                           int32_t dtype);
  /* root: its place in the team. */
  int32_t (*broadcast)(void* context, const hvl_team* team, void* data, int64_t num_bytes, int32_t root);
  /* `sent` may be this rank's block in `received`. */
  int32_t (*allgatherv)(void* context, const hvl_team* team, const void* sent, void* received,
                        const int64_t* num_bytes);
  int32_t (*alltoallv)(void* context, const hvl_team* team, const void* sent, const int64_t* bytes_sent, void* received,
                       const int64_t* bytes_received);
  int32_t (*test)(void* context);
  /* The reason why the last call failed; the text lives until the next call. */
  const char* (*error)(void* context);
  /* The job is broken: nothing else will be called, also if a collective is in progress. */
  void (*broken)(void* context, const char* why);
} hvl_external;

typedef struct hvl_config {
  int32_t abi_version; /* HVL_ABI_VERSION */
  int32_t rank, size;
  int32_t local_rank, local_size;
  int32_t cross_rank, cross_size;
  /* Jobs of several hosts: by rank, the number of its host. Hosts are numbered in the order of their lowest ranks, so
   * rank 0 is on host 0; local ranks are in the order of ranks. Null: all ranks are on one host. */
  const int32_t* hosts;
  const char* const* host_names; /* by number, for messages */
  /* Hosts are a tree: the parent of host h > 0 is host (h - 1) / fan_out. Local rank 0 of a host has a control
   * connection to local rank 0 of the parent and of each child. */
  int32_t fan_out;
  /* To each rank of another host one connection for data, or several: as many on both sides, in the same order; and one
   * for messages; and the control connections. The engine uses duplicates of the descriptors. */
  const hvl_connection* connections;
  int32_t num_connections;
  /* Jobs of several hosts: a non-blocking pipe wakes each rank. The read end of this rank's pipe, and by local rank the
   * write ends; duplicates are used. */
  int32_t wakeup_fd;
  const int32_t* wakeup_fds;
  int32_t seal_data;          /* 1: data on data connections has MACs; on all ranks, or on none */
  int32_t segment_fd;         /* this host's shared memory, hvl_segment_bytes() long, zeroed; -1 if local_size is 1 */
  int32_t processors;         /* available to this host's ranks together */
  const int32_t* local_pids;  /* process ids of this host's ranks, by local rank */
  int64_t slot_bytes;         /* one slot of shared memory */
  int32_t slot_depth;         /* slots per rank */
  int64_t fusion_threshold;   /* bytes of one batch at most; 0 turns fusion off */
  double cycle_time;          /* seconds to wait for more requests when no thread waits for a result */
  int32_t overlap;            /* 0: requests wait until a thread of some rank waits for a result, see config.py */
  int32_t cache_capacity;     /* known tensors at most */
  double stall_warning_time;  /* seconds; 0 turns the warning off */
  double stall_shutdown_time; /* seconds; 0 means never */
  /* Average divides by the size of the process set even if ranks have joined: 1; by the participating ranks: 0. */
  int32_t average_counts_joined;
  int32_t hierarchical_adasum;        /* 1: Adasum combines the averages of hosts */
  int32_t flight_recorder_size;       /* collectives that it keeps */
  const char* flight_recorder_folder; /* where they are written when the job breaks; null or empty: nowhere */
  int32_t autotune;                   /* 1: the two below that are 1 are tuned while the job runs */
  int32_t autotune_fusion_threshold;
  int32_t autotune_cycle_time;
  int32_t autotune_warmup_samples;   /* that do not count */
  int32_t autotune_steps_per_sample; /* training steps */
  const char* autotune_log;          /* a CSV file of rank 0's; null or empty: none */
  const hvl_external* external;      /* copied; its context outlives the engine. Null: the engine's own transports */
  int32_t gpu_operations;            /* hvl_gpu_operations */
  int64_t gpu_staging_bytes;         /* copied between host and GPU at once; a multiple of 64, the same on all ranks */
  const char* cuda_library;          /* the file of libcuda.so.1; null or empty: the loader looks for it */
  const char* nccl_library;          /* the file of libnccl.so.2; likewise */
  int32_t log_level;                 /* 0 trace, 1 debug, 2 info, 3 warning, 4 error, 5 fatal */
} hvl_config;

/* The GPU libraries that this process finds. */
typedef struct hvl_gpu_libraries {
  int32_t cuda_version; /* of the driver: 12040 for 12.4; 0: it cannot be used, and why */
  int32_t nccl_version; /* 21903 for 2.19.3; 0: it cannot be used, and why */
  int32_t num_gpus;     /* that this process sees */
  char why_no_cuda[256];
  char why_no_nccl[256];
} hvl_gpu_libraries;

typedef struct hvl_counters {
  int64_t batches;
  int64_t requests;
  int64_t bytes;
  int64_t negotiated_in_full; /* requests that were not in the response cache */
  int64_t segment_bytes;      /* shared memory of this host divided by its ranks */
  int64_t executed;           /* requests that were part of a batch; the others failed */
  int64_t negotiation_ns;     /* from enqueue to the begin of the batch, of all executed requests together */
  int64_t execution_ns;       /* of all batches together */
  int64_t peer_wait_ns;       /* of that: waiting for other ranks */
  int64_t ranks;              /* of the job; 0 if there is no engine */
} hvl_counters;

/* The time that the other ranks have waited for one. */
typedef struct hvl_straggler_stats {
  int64_t times;     /* that it was ready a millisecond or more after the first rank */
  int64_t waited_ns; /* between the first rank and this one, where this one was the last */
} hvl_straggler_stats;

/* Injected faults: the point in the engine, and the kind of fault. For tests of the effect on the other ranks. */
typedef enum hvl_fault_point {
  HVL_FAULT_IN_NEGOTIATION = 0, /* a request has been sent, and not been answered */
  HVL_FAULT_IN_DATA = 1         /* half of the data of an allreduce is not yet read, so that no rank completes it */
} hvl_fault_point;

typedef enum hvl_fault {
  HVL_FAULT_RAISE = 0,  /* the engine fails, which breaks the job */
  HVL_FAULT_SIGNAL = 1, /* the process gets a signal */
  HVL_FAULT_CLOSE = 2,  /* all TCP connections of the process are shut down */
  HVL_FAULT_SLOW = 3    /* the engine pauses for some time */
} hvl_fault;

int64_t hvl_segment_bytes(const hvl_config* config);
int32_t hvl_init(const hvl_config* config);
/* Ends the job on all ranks; returns when this rank's engine thread has ended. Does nothing if not initialised. */
int32_t hvl_shutdown(void);
int32_t hvl_is_initialized(void);
/* HVL_OK while requests are accepted; else the error that enqueueing one would return: HVL_JOB_BROKEN, HVL_SHUT_DOWN or
 * HVL_NOT_INITIALIZED. */
int32_t hvl_job_status(void);

/* Checks a request as far as one rank can, before or after hvl_init(). Null: see hvl_last_error(). */
hvl_prepared* hvl_prepare(const hvl_request* request);
/* Requests in flight keep what they need. */
void hvl_release(hvl_prepared* prepared);

/* Enqueues with the addresses of the tensors' memory, num_tensors of each. inputs[i] may equal outputs[i].
 *
 * Allgather, gather and alltoall: `outputs` is null, the engine allocates them and hvl_wait() hands them over; an
 * alltoall has a second one after that of each tensor, the rows received from each member (int32). So do a join (int64:
 * the rank that joined last) and the addition of a process set (int64: its id), which have no tensors. The outputs of a
 * gather have no rows, except on the root. Broadcast: the root's inputs are sent and every rank's outputs are written.
 * Reduce: only the root's outputs are written, and only they need an address. Reducescatter: an output holds this
 * rank's rows of dimension 0, size()-th parts of which the first (extent modulo size()) ranks have one more, and is no
 * input. Scatter: each rank gives the shape of one part; the root's input holds the parts of all members of the process
 * set, one after the other, and only it needs an address; an output holds this rank's part, and is no input.
 *
 * `callbacks` may be null. Returns a handle > 0, or 0 if there is a function to call when the request completes. Errors
 * are negated hvl_status, and then no function is called. Does not block. */
int64_t hvl_enqueue(hvl_prepared* prepared, const uintptr_t* inputs, const uintptr_t* outputs,
                    const hvl_callbacks* callbacks);
/* The same for one tensor that is input and output. */
int64_t hvl_enqueue_inplace(hvl_prepared* prepared, uintptr_t data);
/* The same, on a copy that the engine makes of a tensor on the CPU, of at most HVL_MAX_COPIED_BYTES: `data` is not used
 * after the call. hvl_take_copy() gives the result. */
int64_t hvl_enqueue_copied(hvl_prepared* prepared, uintptr_t data);
/* The same for many; writes their handles. Returns an hvl_status: if one is rejected, it and those after it are not
 * enqueued, and their handles are 0. */
int32_t hvl_enqueue_all(hvl_prepared* const* prepared, const uintptr_t* data, int32_t count, int64_t* handles);
/* The handle that this thread's last hvl_enqueue...() of one request has returned; 0: it was rejected. */
int64_t hvl_last_handle(void);
/* The handle of the last request in flight under the name of a prepared one; 0: there is none, or it calls back. */
int64_t hvl_handle_in_flight(hvl_prepared* prepared);
/* The same as hvl_enqueue() and hvl_enqueue_all() for requests with HVL_CUDA. The GPU begins after what `stream`, a
 * CUstream of GPU `device` as the driver numbers them, has been given by now. Rejected while the stream is captured,
 * and for CU_STREAM_PER_THREAD. */
int64_t hvl_enqueue_on_stream(hvl_prepared* prepared, const uintptr_t* inputs, const uintptr_t* outputs,
                              const hvl_callbacks* callbacks, int32_t device, void* stream);
int32_t hvl_enqueue_all_on_stream(hvl_prepared* const* prepared, const uintptr_t* data, int32_t count, int64_t* handles,
                                  int32_t device, void* stream);
/* 1 complete, 0 not complete, or a negated hvl_status. */
int32_t hvl_poll(int64_t handle);
/* Waits up to `timeout` seconds. HVL_IN_PROGRESS: not complete, the handle stays valid. Anything else consumes the
 * handle. `*outputs` becomes an array of `*num_outputs` outputs, null unless the engine allocated some; the array is to
 * be freed with hvl_free(), and so is the data of each. Both pointers may be null: then the outputs are dropped. */
int32_t hvl_wait(int64_t handle, double timeout, hvl_output** outputs, int32_t* num_outputs);
/* The same without waiting and without outputs: HVL_IN_PROGRESS at once if it is not complete. */
int32_t hvl_try_wait(int64_t handle);
/* Waits up to `timeout` seconds, and consumes nothing: HVL_OK if the request is complete, failed or not. */
int32_t hvl_wait_until_complete(int64_t handle, double timeout);
/* As hvl_try_wait(), for a handle of hvl_enqueue_copied(): with HVL_OK, the result has been copied to `result`. */
int32_t hvl_take_copy(int64_t handle, uintptr_t result);
/* Waits for all, then consumes all and writes 0 over them; the status is the first error in order. Consumes none when
 * it returns HVL_IN_PROGRESS. A handle of 0 is passed over. */
int32_t hvl_wait_all(int64_t* handles, int32_t count, double timeout);
/* The same as hvl_wait() and hvl_wait_all(), but the host does not wait for results on a GPU: work that `stream` is
 * given from now on runs after they are valid. The host only waits until the requests are complete. While `stream` is
 * being captured the call fails (HVL_INVALID_ARGUMENT), and consumes none. If the GPU cannot make `stream` wait, this
 * is an error (HVL_RESOURCES), and the host waits until the results are valid. */
int32_t hvl_wait_on_stream(int64_t handle, double timeout, hvl_output** outputs, int32_t* num_outputs, void* stream);
int32_t hvl_wait_all_on_stream(int64_t* handles, int32_t count, double timeout, void* stream);
void hvl_free(void* data);

/* The message that a receive has got. */
typedef struct hvl_received {
  int32_t source; /* global rank */
  int64_t num_bytes;
} hvl_received;

/* Messages from one rank to another, or to itself, in memory of the CPU. `peer`: the global rank of the other one; a
 * receive may have HVL_ANY_SOURCE. `tag`: 0 at least. `process_set`: its id, of which both ranks are members. A receive
 * gets the first message that its peer has sent with this tag and process set and that no other receive has got; with
 * HVL_ANY_SOURCE, the first that has arrived. It fails (HVL_MISMATCH) if the message has another size or dtype; the
 * send does not. Returns a handle, as hvl_enqueue(): a receive completes when the message is in its memory, a send when
 * its memory is not needed any more, which for a large message is when it is received. Does not block. */
int64_t hvl_send(uintptr_t data, int64_t num_bytes, int32_t dtype, int32_t peer, int64_t tag, int32_t process_set);
int64_t hvl_receive(uintptr_t data, int64_t num_bytes, int32_t dtype, int32_t peer, int64_t tag, int32_t process_set);
/* As hvl_wait(), for a handle of hvl_receive(); writes `*received` if the status is HVL_OK. */
int32_t hvl_wait_message(int64_t handle, double timeout, hvl_received* received);

/* Stack-dump requests: blocks until other ranks have waited so long for this one that the coordinator asks; returns the
 * number of the question, to answer with text for the report (HVL_STACK_BYTES of it). 0: the job has ended. */
int64_t hvl_await_stack_request(void);
void hvl_answer_stack_request(int64_t request, const char* text);

const char* hvl_last_error(void);
void hvl_get_counters(hvl_counters* counters);
/* Of the job's ranks 0 to count - 1, as the coordinator has seen them so far. */
void hvl_get_straggler_stats(hvl_straggler_stats* stats, int32_t count);
/* The last collectives of this rank as a JSON array, to be freed with hvl_free(); null if there is no engine. */
char* hvl_get_collective_records(void);
/* From now on writes this rank's activity to a file of trace events, in place of the timeline before; also the begin of
 * batches if `mark_cycles` is not 0. */
int32_t hvl_start_timeline(const char* path, int32_t mark_cycles);
/* Returns when the file is complete. Does nothing without a timeline; hvl_shutdown() does the same. */
void hvl_stop_timeline(void);
/* Injects a fault the next time that the engine reaches this point, and only then. amount: the number of the signal,
 * or seconds. It ends with the engine; a second one at the same point replaces the first. */
int32_t hvl_arm_fault(int32_t point, int32_t fault, double amount);
/* What HVL_FAULT_CLOSE does, at once; also without an engine. */
int32_t hvl_cut_connections(void);
/* Looks for the libraries of these files, as hvl_config has them; any time, also without an engine. If `counts_gpus` is
 * not 0 it initialises CUDA, which a process that is forked later cannot use then; else there are 0 GPUs. A missing
 * library is no error: `found` gives the reason. */
int32_t hvl_find_gpu_libraries(const char* cuda_library, const char* nccl_library, int32_t counts_gpus,
                               hvl_gpu_libraries* found);
const char* hvl_version(void);
/* cffi:end */

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif /* HVL_H */
