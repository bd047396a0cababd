/* How ranks on GPUs wait for each other, for the model checker Spin. tests/test_model.py runs it.
 *
 * Every rank makes the same CALLS calls in stream order. A call sends something to every rank, tells them, waits for all
 * of them, reads what came, and gives credits back. Large calls of rows do so in rounds, and read what came in a round
 * while they send the next one. Names after "=" are the functions of xla_ffi/cuda that a step models.
 *
 * What is checked: nothing is read before it is written, nothing is written over before it is read, no rank takes another
 * call's data for its own; healthy ranks never stop and never report an error; with a rank that dies at any step all
 * others end, and those with an error name it; a rank with an error touches no peer and waits for nothing.
 *
 * Left out: what a kernel does inside (its blocks are one, but for the order of their stores), and weak memory. Every
 * step is one access to memory that another rank can see; sync.cuh says which release and acquire makes it look so.
 *
 * N        ranks
 * CALLS    calls of each, at most 4
 * PROGRAM  bit i: call i+1 moves rows (it has credits); else it is a plan (none, but a buffer of two halves)
 * ROUNDS   of a call of rows; 1 unless given, at most 2
 * Scenario, at most one: CRASH (the last rank dies at any step), SKIP=i (the last rank leaves call i out),
 *          IMPATIENT (any wait may end at any time: limits that are too short, ranks that were stopped),
 *          LEAVE (the last rank's host says at any time that it is gone; its calls may be in flight)
 * Mutants: NO_CONSUMED, CREDIT_BEFORE_READ, ERROR_NOT_FIRST, PUBLISH_BEFORE_LAST_STORE, NO_PARITY, ANY_EPOCH, NO_TAG,
 *          NEVER_AHEAD, POLL_ONE, RECORD_AFTER_WORD, READ_BEFORE_WAIT, NO_ROUND_AHEAD
 */
#ifndef ROUNDS
#define ROUNDS 1
#endif
#define ALL ((1 << N) - 1)
#define LAST (N - 1)
#define BIT(r) (1 << (r))

#define IDS 0
#define ROWS 1
#define PART(call) ((PROGRAM >> ((call) - 1)) & 1)

/* Words and cells of rank `to` that rank `from` writes. A call has the tag `call`. Rounds have cells of their own. */
#define AT(part, to, from) (((part) * N + (to)) * N + (from))
byte arrived_epoch[2 * N * N]; /* = ControlBlockGpu::arrived: one 64-bit word, so epoch and tag change together */
byte arrived_tag[2 * N * N];
byte consumed[N * N]; /* = ControlBlockGpu::consumed, of rows */
#ifdef NO_PARITY
#define HALF(round) ((part) == ROWS -> 2 + (round) : 0)
#else
#define HALF(round) ((part) == ROWS -> 2 + (round) : (epoch) & 1) /* = RankViewGpu::ids and so on take the parity */
#endif
byte cell[(2 + ROUNDS) * N * N]; /* data: the tag of the call that wrote it, 0 once it was read */

bool error[N * N]; /* = ControlBlockGpu::error */
byte record[N];    /* = ControlBlockGpu::record: bits of the ranks that it names */

#if N == 2
#define ANY(f) (f(0) || f(1))
#define EACH(f) (f(0) && f(1))
#define BITS(f) ((f(0) -> 0 : 1) | (f(1) -> 0 : 2))
#else
#define ANY(f) (f(0) || f(1) || f(2))
#define EACH(f) (f(0) && f(1) && f(2))
#define BITS(f) ((f(0) -> 0 : 1) | (f(1) -> 0 : 2) | (f(2) -> 0 : 4))
#endif

#define ERROR(r) error[AT(0, me, r)]
#define CREDIT(r) (consumed[AT(0, me, r)] >= epoch - 1)
#ifdef ANY_EPOCH
#define ARRIVED(r) (arrived_epoch[AT(part, me, r)] != 0)
#define OURS(r) true
#else
#define ARRIVED(r) (arrived_epoch[AT(part, me, r)] >= epoch)
/* A round is an epoch of its own, and a peer may be at a later one of this call. */
#ifdef NO_ROUND_AHEAD
#define LAST_OF_CALL epoch
#else
#define LAST_OF_CALL (epoch + rounds - 1 - round)
#endif
#ifdef NO_TAG
#define SAME(r) (arrived_epoch[AT(part, me, r)] <= LAST_OF_CALL)
#else
#define SAME(r) (arrived_epoch[AT(part, me, r)] <= LAST_OF_CALL && arrived_tag[AT(part, me, r)] == tag)
#endif
/* A plan gives no credits, so a peer may be one ahead; it then has compared this rank's tag of this epoch with its own. */
#ifdef NEVER_AHEAD
#define OURS(r) SAME(r)
#else
#define OURS(r) (SAME(r) || (part == IDS && arrived_epoch[AT(part, me, r)] == epoch + 1))
#endif
#endif

#ifdef CRASH
#define MAY_DIE if :: me == LAST -> goto dead :: true fi
#else
#define MAY_DIE skip
#endif

/* When a wait may reach its limit. Limits are far longer than anything that a rank does: `timeout` is true when no rank
 * can do anything else. Healthy ranks have no limit here, so that Spin would see them stop. */
#if defined(IMPATIENT)
#define LIMIT true
#elif defined(CRASH) || defined(SKIP)
#define LIMIT timeout
#else
#define LIMIT false
#endif

#ifdef POLL_ONE /* a wait looks only at the error words of ranks that it still waits for */
#define PEER_FAILED(f) ANY(f)
#else
#define PEER_FAILED(f) ANY(ERROR)
#endif
#define NO_CREDIT_BUT_ERROR(r) (!CREDIT(r) && ERROR(r))
#define NOT_ARRIVED_BUT_ERROR(r) (!ARRIVED(r) && ERROR(r))

/* = RaiseError: the first record wins; the record before the words. `named`: bits of ranks. */
inline Raise(named) {
  if
  :: error[AT(0, me, me)] -> skip
  :: else ->
    atomic {
      error[AT(0, me, me)] = true;
#ifndef RECORD_AFTER_WORD
      record[me] = named;
#endif
      to = 0;
    }
    do
    :: to < N ->
      atomic { MAY_DIE; error[AT(0, to, me)] = true; to++ }
    :: else -> break
    od;
#ifdef RECORD_AFTER_WORD
    record[me] = named;
#endif
  fi;
  atomic { live = false; names = 0; to = 0 }
}

/* = AdoptError: the record of a rank whose word is set, any of them. */
inline Adopt() {
  atomic {
    if
    :: ERROR(0) -> names = record[0]
    :: ERROR(1) -> names = record[1]
#if N > 2
    :: ERROR(2) -> names = record[2]
#endif
    fi;
    assert(names != 0); /* the word came after the record */
  }
  Raise(names)
}

/* Nobody waits for a limit when a peer has said what is wrong. */
#if defined(CRASH) || defined(SKIP)
#define NOBODY_TOLD assert(!ANY(ERROR))
#else
#define NOBODY_TOLD skip
#endif

/* What only a rank without an error of its own may do: write to a peer, wait for one. A call in flight goes on until it
 * looks, when the host has raised the error; its memory stays until it has ended. */
#ifdef LEAVE
#define ALLOWED assert(me == LAST || !error[AT(0, me, me)])
#else
#define ALLOWED assert(!error[AT(0, me, me)])
#endif

#if N == 2
#define OPTION_FOR_EACH(f) :: f(0) :: f(1)
#else
#define OPTION_FOR_EACH(f) :: f(0) :: f(1) :: f(2)
#endif
#define PUBLISH(r) atomic { (todo & BIT(r)) -> MAY_DIE; arrived_epoch[AT(part, r, me)] = epoch; \
                            arrived_tag[AT(part, r, me)] = tag; todo = todo - BIT(r) }
#define GIVE_BACK(r) atomic { (todo & BIT(r)) -> MAY_DIE; consumed[AT(0, r, me)] = epoch; todo = todo - BIT(r) }

/* = ExpandRows, ReduceRows, PrefetchExpand, ReducePull, MakeTables and PlaceTile: what every rank has sent. */
inline Read(which) {
  to = 0;
  do
  :: live && to < N ->
    atomic {
      MAY_DIE;
      assert(cell[AT(HALF(which), me, to)] == tag); /* it is there, and it is this call's */
      cell[AT(HALF(which), me, to)] = 0;
      to++
    }
  :: else -> break
  od
}

active [N] proctype Rank() {
  byte me = _pid;
  byte call = 1;
  byte tag, part, epoch, epochs[2];
  byte to, names, todo;
  byte round, rounds;
  bool live;

  do
  :: call > CALLS -> break
#ifdef SKIP
  :: call == SKIP && me == LAST -> call++
  :: call <= CALLS && !(call == SKIP && me == LAST) ->
#else
  :: else ->
#endif
    /* = BeginCall, of rows; = PushTile, of plans: error words first. */
    atomic {
      MAY_DIE;
      tag = call;
      part = PART(call);
      epochs[part]++;
      epoch = epochs[part];
      live = true;
      round = 0;
      rounds = (part == ROWS -> ROUNDS : 1);
      to = 0
    }
#ifndef ERROR_NOT_FIRST
    if
    :: ANY(ERROR) -> Adopt()
    :: else
    fi;
#endif

    /* = BeginCall: WaitForAll, of credits. */
#ifndef NO_CONSUMED
    if
    :: live && part == ROWS ->
      ALLOWED;
      if
      :: EACH(CREDIT)
      :: PEER_FAILED(NO_CREDIT_BUT_ERROR) -> Adopt()
      :: atomic { LIMIT && !EACH(CREDIT) -> names = BITS(CREDIT); NOBODY_TOLD };
        Raise(names)
      fi
    :: else
    fi;
#endif

    do
    :: round == rounds -> break
    :: else ->
      /* = SendRows, ReturnRows, PrefetchSend, PushTile: stores to every rank. */
      to = 0;
      do
#ifdef PUBLISH_BEFORE_LAST_STORE
      :: live && to < N - 1 ->
#else
      :: live && to < N ->
#endif
        atomic {
          MAY_DIE;
          ALLOWED;
          assert(cell[AT(HALF(round), to, me)] == 0); /* what was there has been read */
          cell[AT(HALF(round), to, me)] = tag;
          to++
        }
      :: else -> break
      od;

      /* = EndPush: looks at the error words again, after all blocks. */
      if
#ifndef ERROR_NOT_FIRST
      :: live && part == IDS && ANY(ERROR) -> Adopt()
#endif
      :: else
      fi;
      /* = Tail, PublishArrived: a thread for each rank, in any order. */
      todo = (live -> ALL : 0);
      do
      :: todo == 0 -> break
      OPTION_FOR_EACH(PUBLISH)
      od;
#ifdef PUBLISH_BEFORE_LAST_STORE
      if
      :: live -> cell[AT(HALF(round), LAST, me)] = tag
      :: else
      fi;
#endif
      /* = RunStep: blocks that do not send read the round before. They may be later than the word of this round. */
#ifdef READ_BEFORE_WAIT
      Read(round);
#else
      if
      :: round > 0 -> Read(round - 1)
      :: else
      fi;
#endif

      /* = WaitArrived: WaitForAll, of what the peers send. */
      if
      :: live ->
        ALLOWED;
        if
        :: EACH(ARRIVED) ->
          atomic { names = BITS(OURS) }
          if
          :: names != 0 -> Raise(names) /* = ErrorRecord::kMismatch */
          :: else
          fi
        :: PEER_FAILED(NOT_ARRIVED_BUT_ERROR) -> Adopt()
        :: atomic { LIMIT && !EACH(ARRIVED) -> names = BITS(ARRIVED); NOBODY_TOLD };
          Raise(names)
        fi
      :: else
      fi;
      atomic {
        round++;
        if
        :: round < rounds -> epochs[part]++; epoch = epochs[part]
        :: else
        fi
      }
    od;

#ifdef CREDIT_BEFORE_READ
    todo = (live && part == ROWS -> ALL : 0);
    do
    :: todo == 0 -> break
    OPTION_FOR_EACH(GIVE_BACK)
    od;
#endif
#ifndef READ_BEFORE_WAIT
    Read(round - 1);
#endif
#ifndef CREDIT_BEFORE_READ
    /* = PublishConsumed: a thread for each rank, in any order. */
    todo = (live && part == ROWS -> ALL : 0);
    do
    :: todo == 0 -> break
    OPTION_FOR_EACH(GIVE_BACK)
    od;
#endif
    atomic { call++; to = 0; names = 0 }
  od;

  /* The end of a rank that lives. */
  atomic {
#if defined(CRASH) || defined(LEAVE)
    assert(!error[AT(0, me, me)] || me == LAST || record[me] & BIT(LAST));
#elif defined(SKIP)
    assert(error[AT(0, me, me)] || me == LAST);
#elif !defined(IMPATIENT)
    assert(!error[AT(0, me, me)]);
#endif
    skip
  }
dead:
  skip
}

#ifdef LEAVE
/* = RaiseKernel, beside the rank's own kernels. */
active proctype Host() {
  byte me = LAST;
  byte to, names;
  bool live;
  Raise(BIT(LAST))
}
#endif
