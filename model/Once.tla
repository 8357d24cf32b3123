-------------------------------- MODULE Once --------------------------------
(* One key of a store, and the workers whose requests bear it: claim, run the handler, renew, complete, release, take  *)
(* over, fenced; the sweeper, the reaper, an operator; crashes, pauses past the lease, replies that are lost,          *)
(* statements that arrive late, a fail-over that loses the last commits. Guard mode and atomic mode, on the same key.  *)
(*                                                                                                                     *)
(* An action is one statement of stores/postgres/queries.sql, or what a worker does between two of them, in the order  *)
(* of flows/guard.py, handle.py and atomic.py. No fingerprints, steps, accepted operations or tombstones, no owner's   *)
(* lock, one key: none of these has a part in the fence.                                                               *)
EXTENDS Naturals, FiniteSets, TLC

CONSTANTS
    Workers,     \* each has one request at a time; a client retries for ever
    Modes,       \* that requests may have: a set of "guard" and "atomic"
    OnCrash,     \* "rerun" or "refuse"
    Lease,       \* in ticks of the store's clock; there is no other clock
    Retention,   \* the same
    Operations,  \* how many the key is used for: each begins when the one before is past its retention
    Faults,      \* how many there are at most: then they stop
    FailsOver    \* whether a fault may be a fail-over

VARIABLES
    db,       \* the record, and the rows that handlers have committed through its database
    standby,  \* db as it was at some time
    lock,     \* the open transaction that has the key's lock, in atomic mode
    late,     \* statements that their workers have given up, and which may arrive yet
    me,       \* what each worker knows
    effects,  \* by operation: how often the handler had an effect elsewhere, in guard mode
    told,     \* the answers that clients have got
    faults    \* how many there were

vars == <<db, standby, lock, late, me, effects, told, faults>>

-----------------------------------------------------------------------------
(* Values. Times are ticks that are left, so that a clock that never stops has finitely many states.                   *)

Nothing == [attempt |-> 0, token |-> 0]
Free == [state |-> "none", attempt |-> 0, token |-> 0, lease |-> 0, kept |-> 0, answer |-> 0, op |-> 1, rows |-> {}]
Unlocked == [token |-> 0, attempt |-> 0, seen |-> Nothing, sent |-> FALSE]
Idle == [pc |-> "idle", mode |-> "", token |-> 0, attempt |-> 0, seen |-> Nothing, op |-> 0, lease |-> 0]

\* The answer of an attempt is its token: another attempt would have given another answer.
Seen == [attempt |-> db.attempt, token |-> db.token]
Forgotten == [Free EXCEPT !.op = db.op, !.rows = db.rows]
Anew == [Free EXCEPT !.op = db.op + 1]

IsOver == db.state # "processing" \/ db.lease = 0
IsExpired == db.state \in {"processing", "complete"} /\ db.kept = 0 /\ IsOver
MayBeReplaced == IF db.state = "processing" THEN db.lease = 0 ELSE db.state = "complete" /\ db.kept = 0

\* core/decision.py
Decision ==
    CASE db.state = "none"     -> "run"
      [] IsExpired             -> "run"
      [] db.state = "complete" -> "replay"
      [] db.state = "unknown"  -> "refuse"
      [] ~IsOver               -> "busy"
      [] OTHER                 -> IF OnCrash = "rerun" THEN "run" ELSE "refuse"

\* A random token: none that anything knows of.
Known == {db.token, standby.token, lock.token, lock.seen.token} \union {a.answer : a \in told}
         \union UNION {{l.token, l.seen.token} : l \in late} \union UNION {{me[w].token, me[w].seen.token} : w \in Workers}
NewToken == CHOOSE t \in 1..(3 * Cardinality(Workers) + 3 * Faults + 5) :
                t \notin Known /\ \A u \in 1..(t - 1) : u \in Known

Set(w, fields) == me' = [me EXCEPT ![w] = fields @@ @]
Leave(w) == me' = [me EXCEPT ![w] = Idle]
Fault == faults < Faults /\ faults' = faults + 1
IsMine(w) == db.token = me[w].token /\ db.attempt = me[w].attempt /\ db.state = "processing"

-----------------------------------------------------------------------------
(* Guard mode.                                                                                                         *)

Claimed(token) == [Forgotten EXCEPT !.state = "processing", !.attempt = 1, !.token = token,
                                    !.lease = Lease, !.kept = Retention]

TakenOver(token) ==
    IF db.kept = 0 THEN [Claimed(token) EXCEPT !.op = db.op + 1, !.rows = {}]
    ELSE [db EXCEPT !.attempt = @ + 1, !.token = token, !.lease = Lease]

\* A record past its retention begins anew, but not under its own token: who has seen it could not tell the two apart.
CanTakeOver(seen, token) == Seen = seen /\ MayBeReplaced /\ (db.kept > 0 \/ db.token # token)

Hold(w) == Set(w, [pc |-> "run", attempt |-> db'.attempt, op |-> db'.op, lease |-> db'.lease])

Start(w) ==
    /\ me[w].pc = "idle"
    /\ \E mode \in Modes : Set(w, [pc |-> "claim", mode |-> mode, token |-> NewToken])
    /\ UNCHANGED <<db, standby, lock, late, effects, told, faults>>

\* A request that asks again, since a reply was lost, does so within the retention of what it has asked for.
IsInTime(w) == me[w].op = 0 \/ (me[w].op = db.op /\ ~IsExpired)
Asks(w, mode) == me[w].pc = "claim" /\ me[w].mode = mode /\ IsInTime(w)

\* INSERT ... ON CONFLICT DO NOTHING: there is no moment between looking and taking.
Claim(w) ==
    /\ Asks(w, "guard") /\ db.state = "none"
    /\ db' = Claimed(me[w].token)
    /\ Hold(w)
    /\ UNCHANGED <<standby, lock, late, effects, told, faults>>

\* The reply to this very claim was lost: the record bears our token.
IsOwn(w) == db.state = "processing" /\ db.token = me[w].token

FindOwn(w) ==
    /\ Asks(w, "guard") /\ IsOwn(w) /\ ~IsOver
    /\ db' = db /\ Hold(w)
    /\ UNCHANGED <<standby, lock, late, effects, told, faults>>

Find(w) ==
    /\ Asks(w, "guard") /\ db.state # "none" /\ IsOver
    /\ IsOwn(w) \/ Decision = "run"
    /\ Set(w, [pc |-> "take over", seen |-> Seen])
    /\ UNCHANGED <<db, standby, lock, late, effects, told, faults>>

TakeOver(w) ==
    /\ me[w].pc = "take over"
    /\ IF CanTakeOver(me[w].seen, me[w].token)
       THEN db' = TakenOver(me[w].token) /\ Hold(w)
       ELSE db' = db /\ Set(w, [pc |-> "claim", seen |-> Nothing])
    /\ UNCHANGED <<standby, lock, late, effects, told, faults>>

Renew(w) ==
    /\ me[w].pc \in {"run", "complete"} /\ me[w].mode = "guard" /\ IsMine(w) /\ db.lease < Lease
    /\ db' = [db EXCEPT !.lease = Lease]
    /\ Set(w, [lease |-> Lease])
    /\ UNCHANGED <<standby, lock, late, effects, told, faults>>

\* Told by a renewal. A thread can't be stopped: it may go on as well.
Stop(w) ==
    /\ me[w].pc \in {"run", "complete"} /\ me[w].mode = "guard" /\ ~IsMine(w)
    /\ Leave(w)
    /\ UNCHANGED <<db, standby, lock, late, effects, told, faults>>

Run(w) ==
    /\ me[w].pc = "run"
    /\ IF me[w].mode = "guard"
       THEN effects' = [effects EXCEPT ![me[w].op] = @ + 1] /\ Set(w, [pc |-> "complete"])
       ELSE effects' = effects /\ Set(w, [pc |-> "finish"])
    /\ UNCHANGED <<db, standby, lock, late, told, faults>>

Complete(w) ==
    /\ me[w].pc = "complete" /\ IsMine(w)
    /\ db' = [db EXCEPT !.state = "complete", !.answer = me[w].token, !.lease = 0]
    /\ Set(w, [pc |-> "reply", lease |-> 0])
    /\ UNCHANGED <<standby, lock, late, effects, told, faults>>

\* Of a completion with a lost reply.
FindCompleted(w) ==
    /\ me[w].pc = "complete" /\ db.state = "complete"
    /\ db.token = me[w].token /\ db.attempt = me[w].attempt
    /\ Set(w, [pc |-> "reply", lease |-> 0])
    /\ UNCHANGED <<db, standby, lock, late, effects, told, faults>>

Fenced(w) ==
    /\ me[w].pc = "complete" /\ ~IsMine(w)
    /\ ~(db.state = "complete" /\ db.token = me[w].token /\ db.attempt = me[w].attempt)
    /\ Leave(w)
    /\ UNCHANGED <<db, standby, lock, late, effects, told, faults>>

\* An attempt of 0 stands for whatever number the token was given.
Release(w) ==
    /\ me[w].pc = "release"
    /\ db' = IF db.state # "processing" \/ db.token # me[w].token \/ me[w].attempt \notin {0, db.attempt} THEN db
             ELSE IF db.attempt = 1 THEN Forgotten
             ELSE [db EXCEPT !.token = 0, !.lease = 0]
    /\ Leave(w)
    /\ UNCHANGED <<standby, lock, late, effects, told, faults>>

-----------------------------------------------------------------------------
(* Atomic mode: the key's lock, the handler's rows and the finished record are one transaction.                        *)

Begin(w) ==
    /\ Asks(w, "atomic") /\ Decision = "run" /\ lock = Unlocked
    /\ lock' = [token |-> me[w].token, seen |-> Seen, sent |-> FALSE,
                attempt |-> IF db.state = "none" \/ IsExpired THEN 1 ELSE db.attempt + 1]
    /\ Set(w, [pc |-> "run"])
    /\ UNCHANGED <<db, standby, late, effects, told, faults>>

\* The record is inserted where there was none, and replaces the one that was seen otherwise.
CanFinish == IF lock.seen = Nothing THEN db.state = "none" ELSE Seen = lock.seen /\ MayBeReplaced

Finished ==
    LET same == [Forgotten EXCEPT !.kept = IF db.state = "none" THEN Retention ELSE db.kept]
        begun == IF IsExpired THEN [Anew EXCEPT !.kept = Retention] ELSE same
    IN [begun EXCEPT !.state = "complete", !.attempt = lock.attempt, !.token = lock.token, !.answer = lock.token,
                     !.rows = @ \union {lock.token}]

Finish(w) ==
    /\ me[w].pc = "finish" /\ lock.token = me[w].token
    /\ IF CanFinish THEN db' = Finished /\ Set(w, [pc |-> "reply", op |-> db'.op]) ELSE db' = db /\ Leave(w)
    /\ lock' = Unlocked
    /\ UNCHANGED <<standby, late, effects, told, faults>>

\* The connection is gone, and the transaction with it.
FindUndone(w) ==
    /\ me[w].pc \in {"run", "finish"} /\ me[w].mode = "atomic" /\ lock.token # me[w].token
    /\ Leave(w)
    /\ UNCHANGED <<db, standby, lock, late, effects, told, faults>>

\* A COMMIT that was sent, and has no reply: the server carries it out, or not.
EndLate ==
    /\ lock.sent
    /\ \/ CanFinish /\ db' = Finished
       \/ db' = db
    /\ lock' = Unlocked
    /\ UNCHANGED <<standby, late, me, effects, told, faults>>

\* Whether it was carried out is asked once it has let go of the lock.
Settle(w) ==
    /\ me[w].pc = "settle" /\ lock.token # me[w].token
    /\ IF db.state = "complete" /\ db.token = me[w].token THEN Set(w, [pc |-> "reply", op |-> db.op])
       ELSE Leave(w)
    /\ UNCHANGED <<db, standby, lock, late, effects, told, faults>>

-----------------------------------------------------------------------------
(* Both modes.                                                                                                         *)

Replay(w) ==
    /\ me[w].pc = "claim" /\ Decision = "replay"
    /\ told' = told \union {[op |-> db.op, answer |-> db.answer]}
    /\ Leave(w)
    /\ UNCHANGED <<db, standby, lock, late, effects, faults>>

\* 409: in progress, or outcome unknown.
Refuse(w) ==
    /\ me[w].pc = "claim" /\ (IsInTime(w) => ~IsOwn(w))
    /\ ~IsInTime(w) \/ Decision \in {"busy", "refuse"} \/ (me[w].mode = "atomic" /\ Decision = "run" /\ lock # Unlocked)
    /\ Leave(w)
    /\ UNCHANGED <<db, standby, lock, late, effects, told, faults>>

Reply(w) ==
    /\ me[w].pc = "reply"
    /\ told' = told \union {[op |-> me[w].op, answer |-> me[w].token]}
    /\ Leave(w)
    /\ UNCHANGED <<db, standby, lock, late, effects, faults>>

\* A claim without a reply is asked again, under its token, or given up.
AskAgain(w) ==
    /\ me[w].pc = "unsure"
    /\ \E pc \in {"claim", "release"} : Set(w, [pc |-> pc])
    /\ UNCHANGED <<db, standby, lock, late, effects, told, faults>>

-----------------------------------------------------------------------------
(* The services, an operator, and time.                                                                                *)

Sweep ==
    /\ db.state = "processing" /\ db.lease = 0 /\ db.token # 0
    /\ db' = IF OnCrash = "rerun" THEN [db EXCEPT !.token = 0] ELSE [db EXCEPT !.state = "unknown"]
    /\ UNCHANGED <<standby, lock, late, me, effects, told, faults>>

\* What never ended is said to have failed, under no worker's token, and is deleted another time.
Reap ==
    /\ IsExpired
    /\ db' = IF db.state = "complete" THEN Anew ELSE [db EXCEPT !.state = "complete", !.token = 0, !.answer = 0]
    /\ UNCHANGED <<standby, lock, late, me, effects, told, faults>>

\* An operator looks whether there was an effect, when the worker is known to be dead.
Resolve ==
    /\ db.state = "unknown" /\ \A w \in Workers : me[w].token # db.token
    /\ db' = IF effects[db.op] > 0 THEN [db EXCEPT !.state = "complete", !.token = 0, !.answer = 0, !.kept = Retention]
             ELSE Forgotten
    /\ UNCHANGED <<standby, lock, late, me, effects, told, faults>>

Less(n) == IF n = 0 THEN 0 ELSE n - 1
\* The last operation never expires.
Older(r) == [r EXCEPT !.lease = Less(@), !.kept = IF r.op < Operations THEN Less(@) ELSE @]

\* A worker renews its lease in time. One that does not has paused, which is a fault.
Tick ==
    /\ Older(db) # db \/ \E w \in Workers : me[w].lease > 0
    /\ IF \E w \in Workers : me[w].lease = 1 THEN Fault ELSE faults' = faults
    /\ db' = Older(db) /\ standby' = Older(standby)
    /\ me' = [w \in Workers |-> [me[w] EXCEPT !.lease = Less(@)]]
    /\ UNCHANGED <<lock, late, effects, told>>

-----------------------------------------------------------------------------
(* Faults.                                                                                                             *)

\* The database ends the transaction of a process that dies, unless it is to be committed already.
Crash(w) ==
    /\ Fault /\ me[w].pc # "idle"
    /\ Leave(w)
    /\ lock' = IF lock.token = me[w].token /\ ~lock.sent THEN Unlocked ELSE lock
    /\ UNCHANGED <<db, standby, late, effects, told>>

\* The handler says that it had no effect. No fault of anything, but it may not go on for ever.
Fail(w) ==
    /\ Fault /\ me[w].pc = "run"
    /\ IF me[w].mode = "guard" THEN lock' = lock /\ Set(w, [pc |-> "release"])
       ELSE lock' = (IF lock.token = me[w].token THEN Unlocked ELSE lock) /\ Leave(w)
    /\ UNCHANGED <<db, standby, late, effects, told>>

\* The worker knows no more than before it sent the statement, which was carried out, or not, or will be later.
LoseReply(w) ==
    /\ Fault /\ me[w].mode = "guard"
    /\ \/ /\ me[w].pc \in {"claim", "take over"}
          /\ late' = late \union {[token |-> me[w].token, seen |-> me[w].seen, op |-> db.op]}
          /\ Set(w, [pc |-> "unsure", seen |-> Nothing, op |-> db.op])
       \/ /\ me[w].pc = "run"
          /\ late' = late
          /\ Set(w, [pc |-> "unsure", seen |-> Nothing, attempt |-> 0, lease |-> 0])
       \/ me[w].pc = "reply" /\ late' = late /\ Set(w, [pc |-> "complete"])
    /\ UNCHANGED <<db, standby, lock, effects, told>>

LoseCommitReply(w) ==
    /\ Fault /\ me[w].pc = "finish" /\ lock.token = me[w].token
    /\ lock' = [lock EXCEPT !.sent = TRUE]
    /\ Set(w, [pc |-> "settle"])
    /\ UNCHANGED <<db, standby, late, effects, told>>

\* Within the retention, that is: no statement is on its way for a day.
Arrive(l) ==
    /\ db' = IF l.op # db.op THEN db
             ELSE IF l.seen = Nothing /\ db.state = "none" THEN Claimed(l.token)
             ELSE IF l.seen # Nothing /\ CanTakeOver(l.seen, l.token) THEN TakenOver(l.token)
             ELSE db
    /\ late' = late \ {l}
    /\ UNCHANGED <<standby, lock, me, effects, told, faults>>

Replicate ==
    /\ FailsOver /\ standby # db
    /\ standby' = db
    /\ UNCHANGED <<db, lock, late, me, effects, told, faults>>

FailOver ==
    /\ FailsOver /\ standby # db /\ Fault
    /\ db' = standby /\ lock' = Unlocked /\ late' = {}
    /\ UNCHANGED <<standby, me, effects, told>>

-----------------------------------------------------------------------------
Init ==
    /\ db = Free /\ standby = Free /\ lock = Unlocked /\ late = {}
    /\ me = [w \in Workers |-> Idle]
    /\ effects = [o \in 1..Operations |-> 0]
    /\ told = {} /\ faults = 0

Work(w) ==
    \/ Claim(w) \/ FindOwn(w) \/ Find(w) \/ TakeOver(w) \/ Run(w) \/ Complete(w) \/ FindCompleted(w) \/ Fenced(w)
    \/ Release(w) \/ Begin(w) \/ Finish(w) \/ FindUndone(w) \/ Settle(w) \/ Replay(w) \/ Refuse(w) \/ Reply(w)
    \/ AskAgain(w)

Next ==
    \/ \E w \in Workers :
        \/ Start(w) \/ Work(w) \/ Renew(w) \/ Stop(w)
        \/ Crash(w) \/ Fail(w) \/ LoseReply(w) \/ LoseCommitReply(w)
    \/ \E l \in late : Arrive(l)
    \/ EndLate \/ Sweep \/ Reap \/ Resolve \/ Tick \/ Replicate \/ FailOver

Spec == Init /\ [][Next]_vars

\* Faults are never due, and neither is a renewal: a worker that is not paused is quicker than its lease.
Fair == WF_vars(Tick) /\ WF_vars(EndLate) /\ \A w \in Workers : WF_vars(Start(w)) /\ WF_vars(Work(w))

FairSpec == Spec /\ Fair

-----------------------------------------------------------------------------
(* What is promised.                                                                                                   *)

IsLive(w) == me[w].lease > 0

AtMostOneLiveClaim == \A v, w \in Workers : IsLive(v) /\ IsLive(w) => v = w

NothingInFlightIsReaped == \A w \in Workers : IsLive(w) => IsMine(w)

\* A record has the answer of the attempt that holds it, or none of a worker's.
FencedStoresNothing == db.state = "complete" => db.answer = db.token

\* What a client was told of this operation is what the store has.
AnswerIsStoredFirst == \A a \in told : a.op = db.op => db.state = "complete" /\ db.answer = a.answer

OneAnswer == \A a, b \in told : a.op = b.op => a.answer = b.answer

\* Rows and record are there together, and once.
AtomicOnce ==
    /\ \A t \in db.rows : db.state = "complete" /\ db.answer = t
    /\ Modes = {"atomic"} /\ db.state = "complete" => db.rows = {db.answer}

AtMostOnce == OnCrash = "refuse" => \A o \in 1..Operations : effects[o] <= 1

NoAnswerWithoutEffect ==
    Modes = {"guard"} => \A a \in told : a.answer # 0 => effects[a.op] >= 1

\* No claim, no run: where a handler starts, its claim is live.
NoClaimNoRun ==
    [][\A w \in Workers :
        me[w].pc # "run" /\ me'[w].pc = "run" =>
            IF me[w].mode = "guard" THEN db'.token = me[w].token /\ db'.state = "processing" /\ db'.lease > 0
            ELSE lock'.token = me[w].token]_vars

AnswerIsFinal ==
    [][db.state = "complete" /\ db.kept > 0 =>
        db'.state = "complete" /\ db'.answer = db.answer /\ db'.op = db.op]_vars

\* When faults stop, the client that retries gets its answer.
Answered == <>(told # {})

Symmetric == Permutations(Workers)
=============================================================================
