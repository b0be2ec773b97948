/* hvl_parameters.h: the C API of parameter servers. The conventions of hvl.h apply.
 *
 * They need no engine, and an engine that ends or fails does not affect them. A process may serve clients, be the
 * client of servers, or both. It has one thread for all of these (`hvl-parameters`), from the first connection to
 * hvl_parameters_stop(). Calls return at once; a handle shows when the servers have carried a call out. Calls of one
 * client to one server are carried out in their order; there is no order between clients. Memory that is given to a
 * call is borrowed until its handle is complete. Handles are of their own kind: only the functions here take them.
 *
 * In a forked child all functions fail, and the child closes its copies of the connections. */
#ifndef HVL_PARAMETERS_H
#define HVL_PARAMETERS_H

#include <stdint.h>

#include "hvl.h"

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

/* cffi:begin */
enum {
  HVL_PARAMETERS_NAME_BYTES = 64,   /* most in the name of a user's rule, without the zero */
  HVL_PARAMETERS_ARGUMENTS = 4,     /* most of a rule */
  HVL_PARAMETERS_ERROR_BYTES = 1024 /* most in the text of a rule's error, with the zero */
};

/* The elements of a block are updated together: 'adam' counts its updates for each. A shard has (count +
 * HVL_PARAMETERS_BLOCK - 1) / HVL_PARAMETERS_BLOCK blocks. */
enum { HVL_PARAMETERS_BLOCK = 65536 };

/* A connected stream socket. Both ends are authenticated, and nothing is under way on it. The file descriptors are
 * duplicated: the caller may close its own after the call. */
typedef struct hvl_parameters_connection {
  int32_t is_own;   /* 1: the server is this process itself, and the rest but `peer` is not used; else 0 */
  int32_t fd;       /* the socket */
  const char* peer; /* the other end, in errors and in the log: "server 0 on host b" */
  /* The keys for the MACs of the two directions; both ends have them, or none has. */
  int32_t has_keys;
  uint8_t send_key[32];
  uint8_t receive_key[32];
  int32_t seal_data; /* 1: all bytes have MACs; 0: only the headers of messages. The same at both ends */
  /* If both ends are on one host: shared memory of hvl_parameters_segment_bytes() zeros, the same at both ends and for
   * no other connection. The socket then only wakes the other end and shows its end. Else -1. */
  int32_t memory_fd;
  int32_t peer_pid; /* with memory_fd: the process at the other end, whose memory is accessed directly; 0: it is not */
} hvl_parameters_connection;

int64_t hvl_parameters_segment_bytes(void);

/* Serves the client at the other end of the connection from now on. When the connection is lost, the client is dropped
 * and the log has its name. */
int32_t hvl_parameters_add_client(const hvl_parameters_connection* connection);
/* Becomes a client of the server at the other end. Returns the number of the server in this process, which is above 0;
 * or a negated hvl_status. When the connection is lost, pending and later calls to the server fail with its name. */
int64_t hvl_parameters_add_server(const hvl_parameters_connection* connection);
/* Ends the connection to a server. Calls that have not ended fail. */
int32_t hvl_parameters_remove_server(int64_t server);
/* Ends all connections and the thread, and frees all shards. Pending handles complete with HVL_SHUT_DOWN. Does nothing
 * if there is no connection. Must not be called by a rule. */
int32_t hvl_parameters_stop(void);

/* A rule of the user, at the server. Updates `values`, `count` elements of `dtype`, with as many elements `pushed`. An
 * array is updated in parts of up to 512 KiB, or 1 MiB for elements of 16 bytes, and rows one by one: it is called
 * once for each. Returns 0, or anything else after it has written the text of an error, with a zero behind it. Called
 * by the thread of the parameter servers, and other clients wait meanwhile. */
typedef int32_t (*hvl_parameters_rule)(void* context, const char* name, const double* arguments, int32_t num_arguments,
                                       int32_t dtype, void* values, const void* pushed, int64_t count, char* error);
/* Sets the function that carries out all rules of the user; null: there are none. */
int32_t hvl_parameters_set_rule(hvl_parameters_rule rule, void* context);

/* The consecutive elements of an array that one server has. */
typedef struct hvl_parameters_shard {
  int64_t server; /* a number from hvl_parameters_add_server() */
  int64_t count;  /* elements */
} hvl_parameters_shard;

/* An array, as a client sees it. All clients of it give the same values, but for the numbers of the servers. */
typedef struct hvl_parameters_array_config {
  uint64_t id; /* unique among the arrays of all clients of the servers */
  int32_t dtype;
  const hvl_parameters_shard* shards; /* in the order of the elements */
  int32_t num_shards;
  int32_t num_clients; /* clients that will tick; 0: there are no clocks */
} hvl_parameters_array_config;

typedef struct hvl_parameters_array hvl_parameters_array;

/* Null: see hvl_last_error(). Sends nothing. */
hvl_parameters_array* hvl_parameters_open(const hvl_parameters_array_config* config);
/* Frees the client's side. Calls under way continue. */
void hvl_parameters_close(hvl_parameters_array* array);

/* All of the following return a handle > 0 or a negated hvl_status, and do not block. */

/* Creates the shards, with elements of 0. Shards that exist already stay as they are; they must have the same dtype and
 * number of elements. If the array has clocks, this client is one of its `num_clients` from now on. */
int64_t hvl_parameters_create(hvl_parameters_array* array);
/* Frees the shards, at the servers. */
int64_t hvl_parameters_remove(hvl_parameters_array* array);

typedef enum hvl_payload {
  HVL_PAYLOAD_FULL = 0,     /* the array's own dtype */
  HVL_PAYLOAD_BFLOAT16 = 1, /* for float32 and float64 */
  HVL_PAYLOAD_INT8 = 2      /* likewise; each 1024 elements have a scale */
} hvl_payload;

typedef struct hvl_parameters_update {
  const char* rule; /* "zero", "copy", "add", "scale_add", "max", "min", "sgd", "momentum", "adam", or the user's */
  const double* arguments; /* scale_add: scale; sgd: lr; momentum: lr, momentum; adam: lr, beta1, beta2, epsilon */
  int32_t num_arguments;
  int32_t payload; /* hvl_payload: elements are converted before they are sent */
  /* 1: the errors of these conversions are kept in `array`, and added to the elements that are sent there next. "add",
   * "scale_add" and "sgd" share them, whatever their arguments: the missing part of a value comes later. Each other
   * rule has errors of its own, to which its next arguments apply. */
  int32_t feeds_errors_back;
} hvl_parameters_update;

/* Updates elements [offset, offset + count) of the array with `elements`, which are null for the rule 'zero'. */
int64_t hvl_parameters_send(hvl_parameters_array* array, const hvl_parameters_update* update, int64_t offset,
                            int64_t count, const void* elements);
/* Copies the elements [offset, offset + count) to `elements`. */
int64_t hvl_parameters_receive(hvl_parameters_array* array, int64_t offset, int64_t count, void* elements);
/* The same for rows: row i is the elements [i * row_length, (i + 1) * row_length). `rows` has them one after the other,
 * in the order of `indices`, which are copied. A row that is given several times is updated several times, in that
 * order; only elements of the rows are updated. 'adam' counts one update of a block for each part of the rows, of up
 * to 1 MiB, that has some of its elements. */
int64_t hvl_parameters_send_rows(hvl_parameters_array* array, const hvl_parameters_update* update,
                                 const int64_t* indices, int64_t num_rows, int64_t row_length, const void* rows);
int64_t hvl_parameters_receive_rows(hvl_parameters_array* array, const int64_t* indices, int64_t num_rows,
                                    int64_t row_length, void* rows);

/* The state of the rules beside the elements, for checkpoints. HVL_SLOT_0 is the velocity of 'momentum' and the mean
 * of 'adam', HVL_SLOT_1 the mean square of 'adam': as many elements as the array, 0 until a rule uses them.
 * HVL_COUNTERS is the number of updates by 'adam' of each block: a uint64_t for each block of the first shard, then of
 * the next one, and so on. HVL_UPDATES, which is only received, is how many parts of updates each shard that has
 * elements has applied since it was made: a uint64_t for each. If they differ before and after other calls, the array
 * has changed meanwhile. */
typedef enum hvl_state { HVL_SLOT_0 = 0, HVL_SLOT_1 = 1, HVL_COUNTERS = 2, HVL_UPDATES = 3 } hvl_state;
int64_t hvl_parameters_send_state(hvl_parameters_array* array, int32_t state, const void* values);
int64_t hvl_parameters_receive_state(hvl_parameters_array* array, int32_t state, void* values);

/* Advances this client's clock, which the server of the first shard keeps. The handle completes when it is no more than
 * `staleness` ahead of the slowest client's. One of the `num_clients` that has not created the array yet is at 0; a
 * client whose connection has ended does not count. -1 in place of the staleness: this client does not count any more,
 * and does not tick again. */
int64_t hvl_parameters_tick(hvl_parameters_array* array, int64_t staleness);

/* 1 complete, 0 not complete, or a negated hvl_status. */
int32_t hvl_parameters_poll(int64_t handle);
/* Waits up to `timeout` seconds. HVL_IN_PROGRESS: the time is over, or a signal has come; the handle stays valid.
 * Anything else consumes the handle, and is its first error. */
int32_t hvl_parameters_wait(int64_t handle, double timeout);
/* Waits for all handles, then consumes them and overwrites them with 0. Returns the first error in order. Consumes none
 * if it returns HVL_IN_PROGRESS. Skips handles of 0. */
int32_t hvl_parameters_wait_all(int64_t* handles, int32_t count, double timeout);
/* cffi:end */

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif /* HVL_PARAMETERS_H */
