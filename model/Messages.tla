------------------------------ MODULE Messages ------------------------------
(* The messages of one key on their way: written to the outbox with the change that they tell of, sent by relays in    *)
(* their order, delivered by a broker at least once, and handled by consumers with an inbox. Processes crash or pause, *)
(* confirmations and replies to COMMIT are lost.                                                                       *)
(*                                                                                                                     *)
(* An action is one statement of stores/postgres/outbox.sql or inbox.sql, a call of the broker, or what a process does *)
(* between two of them, in the order of flows/relay.py and receive.py. Not here: dead letters, messages that are       *)
(* parked, pauses between tries, the cursor, receipts past their retention, fail-overs. The broker loses nothing and   *)
(* keeps the order in which it was sent; a copy that was delivered and not acked is delivered again.                   *)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS
    Messages,   \* how many there are: 1 is before 2
    Relays,
    Consumers,  \* processes of one consumer, with one inbox
    Lease,      \* of a relay's batch, in ticks of the store's clock
    Faults      \* how many there are at most: then they stop

VARIABLES
    changes,   \* the messages of which the change is committed
    outbox,    \* their rows
    relays,    \* what each relay knows
    queue,     \* the broker's
    sent,      \* what the broker has ever got
    inbox,     \* the receipts
    rows,      \* what handlers have committed: the messages, in that order
    locked,    \* the consumer with an open transaction, which has the message's lock
    consumers, \* what each consumer knows
    faults     \* how many there were

all == <<changes, outbox, relays, queue, sent, inbox, rows, locked, consumers, faults>>
sending == <<changes, outbox, relays>>
receiving == <<inbox, rows, locked, consumers>>

-----------------------------------------------------------------------------
All == 1..Messages
NoRow == [state |-> "none", token |-> 0, lease |-> 0]
IdleRelay == [pc |-> "idle", token |-> 0, batch |-> {}, confirmed |-> {}, lease |-> 0]
IdleConsumer == [pc |-> "idle", message |-> 0]

Fault == faults < Faults /\ faults' = faults + 1
First(messages) == CHOOSE m \in messages : \A n \in messages : m <= n

Known == {outbox[m].token : m \in All} \union {relays[r].token : r \in Relays}
NewToken == CHOOSE t \in 1..(Messages + Cardinality(Relays) + 1) : t \notin Known /\ \A u \in 1..(t - 1) : u \in Known

SetRelay(r, fields) == relays' = [relays EXCEPT ![r] = fields @@ @]
SetConsumer(c, fields) == consumers' = [consumers EXCEPT ![c] = fields @@ @]

-----------------------------------------------------------------------------
(* The application: the change and its message are one commit.                                                         *)

Add ==
    /\ Cardinality(changes) < Messages
    /\ LET m == Cardinality(changes) + 1
       IN /\ changes' = changes \union {m}
          /\ outbox' = [outbox EXCEPT ![m].state = "ready"]
    /\ UNCHANGED <<relays, queue, sent, faults>> /\ UNCHANGED receiving

-----------------------------------------------------------------------------
(* The relays.                                                                                                         *)

Ready == {m \in All : outbox[m].state = "ready"}
IsFree(m) == outbox[m].lease = 0
\* None is taken that has an older one before it which is left out.
CanTake(m) == \A n \in Ready : n <= m => IsFree(n)

ClaimBatch(r) ==
    /\ relays[r].pc = "idle" /\ \E m \in Ready : CanTake(m)
    /\ LET batch == {m \in Ready : CanTake(m)}
       IN /\ outbox' = [m \in All |-> IF m \in batch THEN [state |-> "ready", token |-> NewToken, lease |-> Lease]
                                      ELSE outbox[m]]
          /\ SetRelay(r, [pc |-> "send", token |-> NewToken, batch |-> batch, lease |-> Lease])
    /\ UNCHANGED <<changes, queue, sent, faults>> /\ UNCHANGED receiving

Left(r) == relays[r].batch \ relays[r].confirmed
Holds(r) == \A m \in relays[r].batch : outbox[m].token = relays[r].token

\* One after the other, each when the one before is confirmed.
Send(r) ==
    /\ relays[r].pc = "send" /\ Left(r) # {}
    /\ LET m == First(Left(r))
       IN /\ queue' = Append(queue, m) /\ sent' = sent \union {m}
          /\ SetRelay(r, [confirmed |-> relays[r].confirmed \union {m}])
    /\ UNCHANGED <<changes, outbox, faults>> /\ UNCHANGED receiving

\* The first that is not confirmed stops the rest. It may have arrived.
SendInVain(r) ==
    /\ Fault /\ relays[r].pc = "send" /\ Left(r) # {}
    /\ LET m == First(Left(r))
       IN \/ queue' = Append(queue, m) /\ sent' = sent \union {m}
          \/ UNCHANGED <<queue, sent>>
    /\ SetRelay(r, [pc |-> "settle"])
    /\ UNCHANGED <<changes, outbox>> /\ UNCHANGED receiving

RenewBatch(r) ==
    /\ relays[r].pc = "send" /\ Holds(r) /\ relays[r].lease < Lease
    /\ outbox' = [m \in All |-> IF m \in relays[r].batch THEN [outbox[m] EXCEPT !.lease = Lease] ELSE outbox[m]]
    /\ SetRelay(r, [lease |-> Lease])
    /\ UNCHANGED <<changes, queue, sent, faults>> /\ UNCHANGED receiving

EndBatch(r) ==
    /\ relays[r].pc = "send" /\ (Left(r) = {} \/ ~Holds(r))
    /\ SetRelay(r, [pc |-> "settle"])
    /\ UNCHANGED <<changes, outbox, queue, sent, faults>> /\ UNCHANGED receiving

\* Only what this relay still has, by its token: what is confirmed is deleted, the rest is free again.
SettleBatch(r) ==
    /\ relays[r].pc = "settle"
    /\ LET still == {m \in relays[r].batch : outbox[m].token = relays[r].token}
       IN outbox' = [m \in All |-> IF m \notin still THEN outbox[m]
                                   ELSE IF m \in relays[r].confirmed THEN [NoRow EXCEPT !.state = "sent"]
                                   ELSE [NoRow EXCEPT !.state = "ready"]]
    /\ SetRelay(r, IdleRelay)
    /\ UNCHANGED <<changes, queue, sent, faults>> /\ UNCHANGED receiving

CrashRelay(r) ==
    /\ Fault /\ relays[r].pc # "idle"
    /\ SetRelay(r, IdleRelay)
    /\ UNCHANGED <<changes, outbox, queue, sent>> /\ UNCHANGED receiving

Less(n) == IF n = 0 THEN 0 ELSE n - 1

\* A relay renews its lease in time. One that does not has paused, which is a fault.
Tick ==
    /\ \E m \in All : outbox[m].lease > 0
    /\ IF \E r \in Relays : relays[r].lease = 1 THEN Fault ELSE faults' = faults
    /\ outbox' = [m \in All |-> [outbox[m] EXCEPT !.lease = Less(@)]]
    /\ relays' = [r \in Relays |-> [relays[r] EXCEPT !.lease = Less(@)]]
    /\ UNCHANGED <<changes, queue, sent>> /\ UNCHANGED receiving

-----------------------------------------------------------------------------
(* The consumers. The broker delivers the oldest that is not acked, to any of them, and again.                         *)

Deliver(c) ==
    /\ consumers[c].pc = "idle" /\ queue # <<>>
    /\ SetConsumer(c, [pc |-> "look", message |-> Head(queue)])
    /\ UNCHANGED <<queue, sent, inbox, rows, locked, faults>> /\ UNCHANGED sending

Look(c) ==
    /\ consumers[c].pc = "look"
    /\ IF consumers[c].message \in inbox THEN locked' = locked /\ SetConsumer(c, [pc |-> "ack"])
       ELSE IF locked # 0 THEN locked' = locked /\ SetConsumer(c, IdleConsumer)
       ELSE locked' = c /\ SetConsumer(c, [pc |-> "commit"])
    /\ UNCHANGED <<queue, sent, inbox, rows, faults>> /\ UNCHANGED sending

\* What the handler wrote, and the receipt.
Commit(c) ==
    /\ inbox' = inbox \union {consumers[c].message}
    /\ rows' = Append(rows, consumers[c].message)
    /\ locked' = 0

Handle(c) ==
    /\ consumers[c].pc = "commit" /\ locked = c
    /\ Commit(c)
    /\ SetConsumer(c, [pc |-> "ack"])
    /\ UNCHANGED <<queue, sent, faults>> /\ UNCHANGED sending

\* No more than one copy: another may have arrived meanwhile.
Ack(c) ==
    /\ consumers[c].pc = "ack"
    /\ queue' = IF queue # <<>> /\ Head(queue) = consumers[c].message THEN Tail(queue) ELSE queue
    /\ SetConsumer(c, IdleConsumer)
    /\ UNCHANGED <<sent, inbox, rows, locked, faults>> /\ UNCHANGED sending

\* The reply to COMMIT is lost, whether it was carried out or not: the receipt tells.
LoseCommitReply(c) ==
    /\ Fault /\ consumers[c].pc = "commit" /\ locked = c
    /\ \/ Commit(c)
       \/ locked' = 0 /\ UNCHANGED <<inbox, rows>>
    /\ SetConsumer(c, [pc |-> "settle"])
    /\ UNCHANGED <<queue, sent>> /\ UNCHANGED sending

Settle(c) ==
    /\ consumers[c].pc = "settle" /\ locked = 0
    /\ SetConsumer(c, IF consumers[c].message \in inbox THEN [pc |-> "ack"] ELSE IdleConsumer)
    /\ UNCHANGED <<queue, sent, inbox, rows, locked, faults>> /\ UNCHANGED sending

CrashConsumer(c) ==
    /\ Fault /\ consumers[c].pc # "idle"
    /\ SetConsumer(c, IdleConsumer)
    /\ locked' = IF locked = c THEN 0 ELSE locked
    /\ UNCHANGED <<queue, sent, inbox, rows>> /\ UNCHANGED sending

-----------------------------------------------------------------------------
Init ==
    /\ changes = {} /\ outbox = [m \in All |-> NoRow] /\ relays = [r \in Relays |-> IdleRelay]
    /\ queue = <<>> /\ sent = {}
    /\ inbox = {} /\ rows = <<>> /\ locked = 0 /\ consumers = [c \in Consumers |-> IdleConsumer]
    /\ faults = 0

Relaying(r) == ClaimBatch(r) \/ Send(r) \/ EndBatch(r) \/ SettleBatch(r)
Receiving(c) == Deliver(c) \/ Look(c) \/ Handle(c) \/ Ack(c) \/ Settle(c)

Next ==
    \/ Add \/ Tick
    \/ \E r \in Relays : Relaying(r) \/ RenewBatch(r) \/ SendInVain(r) \/ CrashRelay(r)
    \/ \E c \in Consumers : Receiving(c) \/ LoseCommitReply(c) \/ CrashConsumer(c)

Spec == Init /\ [][Next]_all

Fair ==
    /\ WF_all(Add) /\ WF_all(Tick)
    /\ \A r \in Relays : WF_all(Relaying(r))
    /\ \A c \in Consumers : WF_all(Receiving(c))

FairSpec == Spec /\ Fair

-----------------------------------------------------------------------------
(* What is promised.                                                                                                   *)

MessageWithItsChange == \A m \in All : m \in changes <=> outbox[m].state # "none"

NothingIsLost == \A m \in All : outbox[m].state = "sent" => m \in sent

\* While its lease lasts a relay has its batch, whatever another one does.
LateRelayChangesNothing == \A r \in Relays : relays[r].lease > 0 => Holds(r)

\* Of one key, nothing is sent for the first time before what is older.
OrderOfKey == \A m \in sent : \A n \in 1..m : n \in sent

\* Every row is there once and in order, and the receipt with it.
HandledOnceInOrder == rows = [n \in 1..Cardinality(inbox) |-> n] /\ inbox = 1..Cardinality(inbox)

\* What is sent and neither handled nor in the queue would never be delivered again.
NoAckBeforeCommit == \A m \in sent : m \in inbox \/ \E n \in 1..Len(queue) : queue[n] = m

\* When faults stop, every change takes effect at the consumer.
Arrived == <>(inbox = All)

Symmetric == Permutations(Relays) \union Permutations(Consumers)
=============================================================================
