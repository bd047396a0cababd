/* How ranks on CPUs agree on an order of calls, share their memory and sleep, for the model checker Spin.
 * tests/test_model.py runs it.
 *
 * A rank is a progress thread (= LocalRank::Loop) and an XLA thread that submits CALLS calls in any order, which differs
 * from rank to rank. Names after "=" are the functions of xla_ffi/cpu that a step models.
 *
 * What is checked: all ranks execute the same calls in the same order; nothing is read before it is written or written
 * over before all have read it; nobody sleeps for good (without the limit on sleep that the code has on top); healthy
 * ranks never report an error, also not when one has closed already; with a rank that dies at any step all others end
 * with success or an error that names it.
 *
 * N       ranks
 * CALLS   calls of each, at most 3
 * SAME    calls with this bit move their data through the same part of the chunks; others have a part each
 * EMPTY   calls with this bit have nothing to move
 * VICTIM  a rank that dies at any step
 * WATCH   idle ranks look for ranks that have closed
 * Mutants: NO_REGION, NO_ALL_IN, HEAD_BEFORE_KEY, NO_ROOM, LATE_SNAPSHOT, NO_BELL_OF_STEP, OLD_HEAD
 */
#define ALL ((1 << N) - 1)
#define BIT(i) (1 << (i))
#define LOG 2 /* = ControlBlock::kLog */
#ifndef SAME
#define SAME 0
#endif
#ifndef EMPTY
#define EMPTY 0
#endif
#define REGION(call) ((SAME & BIT(call)) -> CALLS : (call))

byte inbox[N];    /* calls, as bits: = LocalRank::inbox_, under its lock */
byte posts[N];    /* = ControlBlock::posts */
byte steps[N];    /* = ControlBlock::steps */
byte executed[N]; /* = ControlBlock::executed */
bool closed[N];   /* = ControlBlock::closed */
byte head;        /* = ControlBlock::log_head, log */
byte log[LOG];
byte origin;      /* = ControlBlock::origin */
byte text[N];     /* = ControlBlock::error_text: bits of the ranks that it names */

bool rung[N];     /* = Doorbell: rings_ is no longer what it was at Snapshot */
bool asleep[N];   /* = in Doorbell::Wait */

byte data[(CALLS + 1) * N];   /* by region and owner: 1 + the call that wrote it */
byte unread[(CALLS + 1) * N]; /* ranks that have yet to read it */
byte order[CALLS];            /* 1 + the call that the first rank to come here executed */
bool failed_[N];              /* = LocalRank::failed_ */

#ifdef VICTIM
#define MAY_DIE if :: me == VICTIM -> goto dead :: true fi
#define LIMIT timeout /* limits are far longer than anything that a rank does */
#else
#define MAY_DIE skip
#define LIMIT false
#endif

/* = Doorbell::Ring, Wait. Both are one step here: a ring before the futex looks at rings_ keeps the owner awake, and one
 * after it finds sleeping_ set, because the owner sets it first. */
#define RING(whom) rung[whom] = true; asleep[whom] = false
#if N == 2
#define RING_ALL atomic { RING(0); RING(1) }
#else
#define RING_ALL atomic { RING(0); RING(1); RING(2) }
#endif

#if N == 2
#define REACHED(s) (steps[0] >= (s) && steps[1] >= (s))
#define SLOWEST (executed[0] < executed[1] -> executed[0] : executed[1])
#define LATE(s) ((steps[0] < (s) -> 1 : 0) | (steps[1] < (s) -> 2 : 0))
#define UNPOSTED(c) ((posts[0] & BIT(c) -> 0 : 1) | (posts[1] & BIT(c) -> 0 : 2))
#define COMPLETE (posts[0] & posts[1])
#else
#define REACHED(s) (steps[0] >= (s) && steps[1] >= (s) && steps[2] >= (s))
#define SLOWER(a, b) (executed[a] < executed[b] -> executed[a] : executed[b])
#define SLOWEST (SLOWER(0, 1) < executed[2] -> SLOWER(0, 1) : executed[2])
#define LATE(s) ((steps[0] < (s) -> 1 : 0) | (steps[1] < (s) -> 2 : 0) | (steps[2] < (s) -> 4 : 0))
#define UNPOSTED(c) ((posts[0] & BIT(c) -> 0 : 1) | (posts[1] & BIT(c) -> 0 : 2) | (posts[2] & BIT(c) -> 0 : 4))
#define COMPLETE (posts[0] & posts[1] & posts[2])
#endif

/* = LocalRank::Raise: the text before the number; the first one wins. */
inline Raise(named) {
  if
  :: origin == 0 ->
    text[me] = named;
    atomic { MAY_DIE; if :: origin == 0 -> origin = me + 1 :: else fi };
    RING_ALL
  :: else
  fi
}

/* = LocalRank::PublishStep */
inline PublishStep() {
  atomic { MAY_DIE; step++; steps[me] = step };
#ifndef NO_BELL_OF_STEP
  atomic {
    if
    :: REACHED(step) -> RING(0); RING(1);
#if N > 2
      RING(2)
#endif
    :: else
    fi
  }
#endif
}

#ifdef NO_ROOM
#define ROOM true
#else
#define ROOM (head - SLOWEST < LOG)
#endif
#ifdef NO_REGION
#define GO(s) true
#else
#define GO(s) REACHED(s)
#endif
#ifdef NO_ALL_IN
#define ALL_ARE_IN true
#else
#define ALL_ARE_IN REACHED(step)
#endif

#define IDLE 0
#define AT_REGION 1
#define ALL_IN 2

active [N] proctype Rank() {
  byte me = _pid;
  byte mine;                 /* posted and not executed: = LocalRank::posted_ */
  byte free[CALLS + 1];      /* = LocalRank::region_free_ */
  byte seen, complete, ready; /* the leader's: = Leader::posted_by_; complete ones that are not in the log yet */
  byte step, entry, call, to, c, names;
  byte phase = IDLE;
  bool moved;

  do
  :: entry == CALLS -> break
  :: else ->
    atomic {
      moved = false;
#ifndef LATE_SNAPSHOT
      rung[me] = false; /* = Doorbell::Snapshot */
#endif
      if
      :: origin != 0 -> goto failed /* = LocalRank::AdoptError */
      :: else
      fi
    };

    /* = LocalRank::PostCalls */
    atomic {
      if
      :: inbox[me] -> MAY_DIE; posts[me] = posts[me] | inbox[me]; mine = mine | inbox[me]; inbox[me] = 0; moved = true
      :: else
      fi
    };
    if
    :: moved && me != 0 -> atomic { RING(0) }
    :: else
    fi;

    /* = Leader::Match */
    if
    :: me == 0 ->
      atomic {
        ready = COMPLETE & ~seen;
        seen = seen | ready;
        complete = complete | ready;
        ready = 0; c = 0
      };
      do
      :: atomic { c < CALLS && (complete & BIT(c)) && ROOM ->
#ifdef HEAD_BEFORE_KEY
        MAY_DIE; head++ };
        log[(head - 1) % LOG] = c;
#else
        MAY_DIE; log[head % LOG] = c };
        atomic { MAY_DIE; head++ };
#endif
        atomic { complete = complete & ~BIT(c); moved = true; c++; RING(0); RING(1);
#if N > 2
          RING(2)
#endif
        }
      :: atomic { c < CALLS && !((complete & BIT(c)) && ROOM) -> c++ }
      :: atomic { c == CALLS -> c = 0; break }
      od
    :: else
    fi;

    /* = LocalRank::Advance */
    if
    :: phase == IDLE && entry < head -> /* = BeginEntry */
      atomic {
        call = log[entry % LOG];
        moved = true;
        assert(mine & BIT(call)); /* the log names no call that this rank has not posted */
        if
        :: order[entry] == 0 -> order[entry] = call + 1
        :: else -> assert(order[entry] == call + 1)
        fi;
        if
        :: EMPTY & BIT(call) -> goto finish
        :: else -> phase = AT_REGION
        fi
      }
    :: phase == AT_REGION && GO(free[REGION(call)]) -> /* = Call::CopyIn, into chunks that others read */
      atomic {
        MAY_DIE;
        moved = true;
        assert(unread[REGION(call) * N + me] == 0);
        data[REGION(call) * N + me] = call + 1;
        unread[REGION(call) * N + me] = ALL
      };
      PublishStep();
      phase = ALL_IN
    :: phase == ALL_IN && ALL_ARE_IN -> /* = Call::CopyOut */
      moved = true;
      to = 0;
      do
      :: to < N ->
        atomic {
          MAY_DIE;
          assert(data[REGION(call) * N + to] == call + 1);
          unread[REGION(call) * N + to] = unread[REGION(call) * N + to] & ~BIT(me);
          to++
        }
      :: else -> to = 0; break
      od;
      PublishStep();
      free[REGION(call)] = step;
finish: /* = LocalRank::FinishEntry */
      atomic { MAY_DIE; posts[me] = posts[me] & ~BIT(call); mine = mine & ~BIT(call); phase = IDLE };
      atomic { MAY_DIE; entry++; executed[me] = entry };
      if
      :: me != 0 -> atomic { RING(0) } /* the code rings at every fourth part of the log */
      :: else
      fi
    :: else
    fi;

#ifdef WATCH
    /* = LocalRank::Watch: a rank that has not posted a call of mine and never will. */
    if
    :: !moved && phase == IDLE && entry == head && mine ->
      c = 0;
      do
      :: c < CALLS && (mine & BIT(c)) ->
        names = UNPOSTED(c);
        to = 0;
        do
        :: to < N && (names & BIT(to)) && closed[to] ->
#ifndef OLD_HEAD
          if
          :: entry < head -> break /* it has executed the call since */
          :: else -> assert(false)
          fi
#else
          assert(false)
#endif
        :: to < N && !((names & BIT(to)) && closed[to]) -> to++
        :: to == N -> break
        od;
        to = 0; names = 0; c++
      :: c < CALLS && !(mine & BIT(c)) -> c++
      :: c == CALLS -> c = 0; break
      od
    :: else
    fi;

#endif

    /* = Doorbell::Wait */
    if
    :: !moved ->
#ifdef LATE_SNAPSHOT
      rung[me] = false;
#endif
      atomic { if :: !rung[me] -> asleep[me] = true :: else fi };
      if
      :: !asleep[me]
      :: LIMIT -> /* = LocalRank::Watch, Missing */
        atomic {
          asleep[me] = false;
          if
          :: phase == ALL_IN -> names = LATE(step)
          :: phase == AT_REGION -> names = LATE(free[REGION(call)])
          :: else ->
            names = 0; c = 0;
            do
            :: c < CALLS && (mine & BIT(c)) -> names = UNPOSTED(c); break
            :: c < CALLS && !(mine & BIT(c)) -> c++
            :: c == CALLS -> break
            od;
            /* All have posted: the leader does not append. */
            if :: names == 0 && c < CALLS -> names = 1 :: else fi;
            c = 0
          fi
        };
        if
        :: names -> Raise(names)
        :: else -> break /* nothing of this rank's is in flight */
        fi;
        names = 0
      fi
    :: else
    fi
  od;
  goto end;
failed:
  atomic { failed_[me] = true; assert(text[origin - 1] != 0) }
end:
#ifdef VICTIM
  atomic { if :: failed_[me] -> assert(text[origin - 1] & BIT(VICTIM)) :: else fi };
#else
  assert(!failed_[me]);
#endif
  closed[me] = true; /* = the end of LocalRank::Loop */
  RING_ALL;
dead:
  skip
}

/* Submits this rank's calls, in any order. = LocalRank::Submit, which rings under the lock of the inbox. */
active [N] proctype Xla() {
  byte me = _pid - N;
  byte left = BIT(CALLS) - 1;
  byte call;

  do
  :: left == 0 -> break
  :: left & BIT(0) -> call = 0; goto submit
  :: left & BIT(1) -> call = 1; goto submit
  :: left & BIT(2) -> call = 2;
submit:
    atomic { inbox[me] = inbox[me] | BIT(call); left = left & ~BIT(call); call = 0; RING(me) }
  od
}
