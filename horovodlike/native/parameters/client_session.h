// A client's session with one server of parameters.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "parameters/session.h"

namespace hvl {

// A command with its memory.
struct Piece {
  // Called when a command has ended, with its status.
  using OnEnd = std::function<void(Piece* piece, const Status& status)>;

  Command command;             // the session sets its number, num_inline
  const char* sent = nullptr;  // the payload
  uint64_t num_sent = 0;       // bytes
  char* received = nullptr;    // memory for the elements of a pull
  uint64_t num_received = 0;   // bytes
  bool is_sent = false;        // the payload, if it is a message of its own
  bool is_coming = false;      // the elements of a pull are being written to `received`
  uint64_t patience = 0;       // nanoseconds: a server that does not answer for so long is lost; 0: for ever
  bool is_answered = false;    // at its end: by the server
  uint32_t view = 0;           // in the answer
  OnEnd on_end;                // null: that of the session

  // True if the payload is a message of its own.
  bool is_large() const { return num_sent > kInlineBytes; }
  void set_number(uint64_t number);
  // Takes the server's answer; returns its status, for the user.
  Status take(const Reply& reply, const std::string& server);
  // Calls on_end, or that of the session. The piece may be gone then.
  void end(const Status& status, const OnEnd& on_end_of_session);
};

class ClientSession final : public Session {
 public:
  ClientSession(const std::string& server, std::unique_ptr<PeerStream> stream, const MessageKeys* keys,
                Piece::OnEnd on_end);

  // Takes a command, which is borrowed until it has ended, and so is its memory. Commands of a session are carried out
  // in order. They leave in batches: as few at a time as the server must keep for that.
  void call(Piece* piece);
  // Returns an error if the server does not answer. Called now and then.
  Status check_patience(uint64_t now);
  // Bytes have moved, or this process was paused: the server has time to answer from now on.
  void renew_patience();
  bool has_pending() const { return !pending_.empty() || !waiting_.empty(); }
  bool can_call() const { return !waiting_.empty() && has_room_for(*waiting_.front()); }
  // Tells the server that the client ends the connection.
  void leave();
  // Ends all commands that have not ended with an error; progress() must not be called any more.
  void fail(const Status& status);

 private:
  Status on_batch(Bytes batch) override;
  Status on_elements(uint64_t number, uint64_t num_bytes) override;
  Status on_fetched(uint64_t number) override;
  Status on_sent(uint64_t number) override;
  Status before_sending() override;

  static uint64_t cost_of(const Piece& piece);
  bool has_room_for(const Piece& piece) const;
  void end(uint64_t number, const Status& status);

  const Piece::OnEnd on_end_;
  std::deque<Piece*> waiting_;                    // to be sent
  std::unordered_map<uint64_t, Piece*> pending_;  // by number
  uint64_t next_number_ = 1;
  Piece question_;  // to which a server that is alive answers
  bool is_asking_ = false;
  uint64_t patience_ = 0;
  uint64_t last_news_ = 0;
  size_t num_large_ = 0;          // pending commands with a payload of their own
  uint64_t num_batch_bytes_ = 0;  // of pending commands in batches
};

}  // namespace hvl
