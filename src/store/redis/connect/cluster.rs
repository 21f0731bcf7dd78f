//! A cluster: each key on the node that has its slot.
//!
//! A call touches one key, so it goes to one node and is never split. What a node refuses (MOVED,
//! ASK, TRYAGAIN) it has not done, so it is sent on at once; what has no answer is never sent again
//! here. A cluster client that repeats calls by itself would do so without knowing what they mean.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::redis::{Cmd, ConnectionInfo, RedisError, Value};
use tokio::time::{Instant, sleep, timeout};

use super::address::{moved, place_of};
use super::kin::{self, Kin};
use super::{Dialer, Failure, Message, Node, TooLong, Urgency};
use crate::error::StoreErrorKind;
use crate::store::redis::call::{Answer, Call};

const SLOTS: usize = 16_384;

/// How often one call is sent on. A slot moves once, and a cluster that moves it again and again
/// within one call is not well.
const MOST_REDIRECTIONS: usize = 6;

/// The pause before a node is asked again that said TRYAGAIN: a key is moved within a millisecond.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(20);

/// The least time between two looks at the map, however many calls fail. A failover takes seconds.
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// How often the log says that no node tells who has which slots, while that is so.
const TOLD_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// How many names are tried for one that falls to each node. A node with a single slot is missed once in three
/// thousand times, and one with a hundredth of them never.
const MARKS_TRIED: usize = 8 * SLOTS;

/// Clones share the nodes.
#[derive(Clone)]
pub(in crate::store::redis) struct Cluster(Arc<Inner>);

struct Inner {
    /// How to connect to a node, whatever its place is.
    template: ConnectionInfo,
    connect_timeout: Duration,
    call_timeout: Duration,
    seeds: Vec<Arc<Member>>,
    kin: Arc<Kin>,
    map: Mutex<Map>,
    looking: AtomicBool,
    /// When the log was told last that no node answers; none once one does.
    told: Mutex<Option<Instant>>,
    next_to_ask: AtomicUsize,
}

struct Map {
    members: HashMap<(String, u16), Arc<Member>>,
    /// Who has which slot.
    owners: Vec<Option<Arc<Member>>>,
}

struct Member {
    host: String,
    node: Node,
}

/// A node's part of the slots: first, last, host and port.
type Range = (usize, usize, String, u16);

#[derive(Clone, Copy, thiserror::Error)]
enum Lost {
    #[error(
        "no node of the cluster has the key's slot: some slots are assigned to nobody; \
         `redis-cli --cluster check` on a node says which, and `--cluster fix` assigns them"
    )]
    NoOwner,
    #[error(
        "no slot of the cluster is assigned to a node: make a cluster of the nodes first, with \
         `redis-cli --cluster create host:port host:port host:port`"
    )]
    NoSlots,
    #[error("the cluster sent the call on {MOST_REDIRECTIONS} times, and no node took it")]
    TooManyRedirections,
    #[error("the node's reply about the slots of the cluster cannot be read")]
    UnreadableMap,
    #[error(
        "the node is not of the cluster any more that this program is connected to: it knows none of its nodes; if the \
         cluster was made anew, start the program again"
    )]
    Stranger,
}

/// As it is displayed: programs whose `main` returns an error print it like this.
impl fmt::Debug for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Cluster {
    /// Connects to the first of these nodes that knows the cluster.
    pub(in crate::store::redis) async fn connect(
        seeds: Vec<ConnectionInfo>,
        connect_timeout: Duration,
        call_timeout: Duration,
    ) -> Result<Self, Failure> {
        let template = seeds.first().cloned().ok_or_else(|| not_sent(Lost::NoOwner))?;
        let kin = Arc::<Kin>::default();
        let member = |seed: &ConnectionInfo| {
            let (host, port) = place_of(seed).unwrap_or(("", 0));
            let dialer = Dialer::of_a_cluster(seed.clone(), &kin, connect_timeout);
            let node =
                Node::lazy(dialer.map_err(|error| Failure::NotSent(error.into()))?, call_timeout);
            Ok(((host.to_owned(), port), Arc::new(Member { host: host.to_owned(), node })))
        };
        let members: Vec<_> = seeds.iter().map(member).collect::<Result<_, Failure>>()?;
        let this = Self(Arc::new(Inner {
            template,
            connect_timeout,
            call_timeout,
            seeds: members.iter().map(|(_, member)| Arc::clone(member)).collect(),
            kin,
            map: Mutex::new(Map {
                members: members.into_iter().collect(),
                owners: vec![None; SLOTS],
            }),
            looking: AtomicBool::new(false),
            told: Mutex::default(),
            next_to_ask: AtomicUsize::new(0),
        }));
        let deadline = Instant::now() + connect_timeout;
        loop {
            match this.look().await {
                Ok(()) => return Ok(this),
                Err(failure) if failure.kind() == StoreErrorKind::Backend => return Err(failure),
                Err(failure) if Instant::now() >= deadline => return Err(failure),
                Err(_) => sleep(BETWEEN_LOOKS).await,
            }
        }
    }

    pub(super) fn call_timeout(&self) -> Duration {
        self.0.call_timeout
    }

    /// Runs a script where its key is. Takes at most twice the call timeout.
    pub(super) async fn run(&self, call: &Call, urgency: Urgency) -> Result<Answer, Failure> {
        let limit = self.0.call_timeout * 2;
        match timeout(limit, self.follow(call, urgency)).await {
            Ok(result) => result,
            Err(_) => Err(Failure::NoAnswer(TooLong::Reply(limit).into())),
        }
    }

    async fn follow(&self, call: &Call, urgency: Urgency) -> Result<Answer, Failure> {
        let slot = slot_of(call.key());
        let mut asking = false;
        let mut member = self.owner(slot)?;
        for _ in 0..=MOST_REDIRECTIONS {
            let message = Message::Script { call, asking };
            let error = match member.node.run(message, urgency).await {
                Ok(answer) => {
                    if message.fell_short(&answer) {
                        self.look_soon();
                    }
                    return Ok(answer);
                }
                Err(Failure::Refused(error)) => error,
                Err(failure) => {
                    self.look_soon();
                    return Err(failure);
                }
            };
            asking = false;
            match error.code() {
                Some("MOVED") => {
                    member = self.named(&error, &member)?;
                    self.lock().owners[slot] = Some(Arc::clone(&member));
                    self.look_soon();
                }
                Some("ASK") => {
                    member = self.named(&error, &member)?;
                    asking = true;
                }
                Some("TRYAGAIN") => {
                    sleep(TRY_AGAIN_AFTER).await;
                    member = self.owner(slot)?;
                }
                Some("CLUSTERDOWN" | "READONLY" | "LOADING" | "MASTERDOWN") => {
                    self.look_soon();
                    return Err(Failure::Refused(error));
                }
                Some(_) | None => return Err(Failure::Refused(error)),
            }
        }
        Err(not_sent(Lost::TooManyRedirections))
    }

    /// Asks every node that has slots.
    pub(super) async fn ask(&self, question: &Cmd) -> Vec<Result<Value, Failure>> {
        let mut owners: Vec<Arc<Member>> = self.lock().owners.iter().flatten().cloned().collect();
        owners.dedup_by(|one, other| Arc::ptr_eq(one, other));
        owners.sort_by_key(|member| Arc::as_ptr(member) as usize);
        owners.dedup_by(|one, other| Arc::ptr_eq(one, other));
        let answers = owners.iter().map(async |member| {
            let answer = member.node.run(Message::Question(question), Urgency::Urgent).await?;
            Ok(answer.value)
        });
        futures_util::future::join_all(answers).await
    }

    /// How many slots are assigned to nobody.
    pub(super) fn slots_of_nobody(&self) -> usize {
        self.lock().owners.iter().filter(|owner| owner.is_none()).count()
    }

    /// The nodes that have slots, by name and in the order of their names.
    pub(super) fn primaries(&self) -> Vec<String> {
        let map = self.lock();
        let has_slots = |member: &Arc<Member>| {
            map.owners.iter().flatten().any(|owner| Arc::ptr_eq(owner, member))
        };
        let members = map.members.iter().filter(|(_, member)| has_slots(member));
        let mut names: Vec<_> = members.map(|((host, port), _)| format!("{host}:{port}")).collect();
        names.sort();
        names
    }

    /// For each node that has slots its name and a key of its own: the same as of one server for the node that has it,
    /// and one of many like it for the others.
    pub(super) fn marks(&self, prefix: &str) -> Vec<(String, String)> {
        let (names, owners) = {
            let map = self.lock();
            let (mut names, mut numbers) = (Vec::new(), HashMap::new());
            for ((host, port), member) in &map.members {
                numbers.insert(Arc::as_ptr(member), names.len());
                names.push(format!("{host}:{port}"));
            }
            let number = |owner: &Option<Arc<Member>>| {
                owner.as_ref().and_then(|owner| numbers.get(&Arc::as_ptr(owner)).copied())
            };
            (names, map.owners.iter().map(number).collect::<Vec<_>>())
        };
        let mut missing: HashSet<usize> = owners.iter().flatten().copied().collect();
        let mut marks = Vec::new();
        for number in 0..MARKS_TRIED {
            if missing.is_empty() {
                break;
            }
            let mark = match number {
                0 => format!("{prefix}:{{ready}}"),
                _ => format!("{prefix}:{{ready:{number}}}"),
            };
            if let Some(owner) = owners[slot_of(mark.as_bytes())]
                && missing.remove(&owner)
            {
                marks.push((names[owner].clone(), mark));
            }
        }
        marks
    }

    /// Asks the node of this name.
    pub(super) async fn ask_one(
        &self,
        name: &str,
        message: Message<'_>,
    ) -> Result<Answer, Failure> {
        let member = {
            let map = self.lock();
            let named = |&(host, port): &(&str, u16)| format!("{host}:{port}") == name;
            let mut members = map.members.iter();
            members
                .find(|((host, port), _)| named(&(host, *port)))
                .map(|(_, member)| Arc::clone(member))
        };
        let member = member.ok_or_else(|| not_sent(Lost::NoOwner))?;
        let answer = member.node.run(message, Urgency::Ordinary).await;
        if answer.is_err() {
            self.look_soon();
        }
        answer
    }

    fn lock(&self) -> MutexGuard<'_, Map> {
        // Nothing that can panic runs while the map is half changed.
        self.0.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn owner(&self, slot: usize) -> Result<Arc<Member>, Failure> {
        let owner = self.lock().owners[slot].clone();
        owner.ok_or_else(|| {
            self.look_soon();
            not_sent(Lost::NoOwner)
        })
    }

    /// The node that a refusal names.
    fn named(&self, error: &RedisError, by: &Member) -> Result<Arc<Member>, Failure> {
        let place = error.redirect_node().and_then(|(address, _)| address.rsplit_once(':'));
        let place = place.and_then(|(host, port)| Some((host, port.parse().ok()?)));
        let Some((host, port)) = place else { return Err(not_sent(Lost::UnreadableMap)) };
        let host = if known(host) { host } else { &by.host };
        self.member(&mut self.lock(), host, port)
    }

    fn member(&self, map: &mut Map, host: &str, port: u16) -> Result<Arc<Member>, Failure> {
        if let Some(member) = map.members.get(&(host.to_owned(), port)) {
            return Ok(Arc::clone(member));
        }
        let info = moved(&self.0.template, host, port);
        let dialer = Dialer::of_a_cluster(info, &self.0.kin, self.0.connect_timeout);
        let dialer = dialer.map_err(|error| Failure::NotSent(error.into()))?;
        let node = Node::lazy(dialer, self.0.call_timeout);
        let member = Arc::new(Member { host: host.to_owned(), node });
        map.members.insert((host.to_owned(), port), Arc::clone(&member));
        Ok(member)
    }

    /// Looks at the map in a task of its own, unless one is doing so already.
    fn look_soon(&self) {
        if self.0.looking.swap(true, Ordering::AcqRel) {
            return;
        }
        let this = self.clone();
        // Nobody joins it: it ends within the time limits of the nodes it asks.
        tokio::spawn(async move {
            this.tell(this.look().await);
            sleep(BETWEEN_LOOKS).await;
            this.0.looking.store(false, Ordering::Release);
        });
    }

    fn tell(&self, looked: Result<(), Failure>) {
        // Nothing that can panic runs while it is locked.
        let mut told = self.0.told.lock().unwrap_or_else(PoisonError::into_inner);
        let Err(failure) = looked else {
            *told = None;
            return;
        };
        if told.is_none_or(|at| at.elapsed() >= TOLD_AGAIN_AFTER) {
            *told = Some(Instant::now());
            tracing::warn!(cause = %failure.into_cause(), "no node of the cluster says who has which slots");
        }
    }

    /// Asks one node after another who has which slots, until one answers; each time beginning with
    /// another one, since one that is cut off from the rest would tell old tales.
    async fn look(&self) -> Result<(), Failure> {
        let question = kin::slots();
        let mut members: Vec<_> = self.lock().members.values().cloned().collect();
        let first = self.0.next_to_ask.fetch_add(1, Ordering::Relaxed) % members.len().max(1);
        members.rotate_left(first);
        members.extend(self.0.seeds.iter().cloned());
        let (mut failure, mut answered) = (not_sent(Lost::NoOwner), false);
        for member in members {
            match member.node.run(Message::Question(&question), Urgency::Urgent).await {
                Ok(answer) => match ranges(&answer.value, &member.host) {
                    Some(ranges) if ranges.is_empty() => {
                        failure = not_sent(Lost::NoSlots);
                        answered = true;
                    }
                    // It was made a node of another cluster, over a connection from before.
                    Some(_) if !self.0.kin.know(&answer.value) => {
                        failure = not_sent(Lost::Stranger);
                        answered = true;
                    }
                    Some(ranges) => {
                        self.learn(&ranges)?;
                        self.0.kin.are(&answer.value);
                        return Ok(());
                    }
                    None => failure = not_sent(Lost::UnreadableMap),
                },
                // What was said by one that is there counts for more.
                Err(_) if answered => {}
                Err(said) => failure = said,
            }
        }
        Err(failure)
    }

    fn learn(&self, ranges: &[Range]) -> Result<(), Failure> {
        let mut map = self.lock();
        let mut owners = vec![None; SLOTS];
        for (first, last, host, port) in ranges {
            let member = self.member(&mut map, host, *port)?;
            for owner in owners.iter_mut().take(last + 1).skip(*first) {
                *owner = Some(Arc::clone(&member));
            }
        }
        // Nodes without slots keep no connection. Seeds stay: one may be a name for many nodes.
        map.members.retain(|_, member| {
            ranges.iter().any(|(first, ..)| {
                owners[*first].as_ref().is_some_and(|owner| Arc::ptr_eq(owner, member))
            })
        });
        map.owners = owners;
        Ok(())
    }
}

fn not_sent(lost: Lost) -> Failure {
    Failure::NotSent(lost.into())
}

/// A node that does not know its own name says nothing, or a question mark.
fn known(host: &str) -> bool {
    !host.is_empty() && host != "?"
}

/// Reads the answer to CLUSTER SLOTS. Only owners count: a replica is never written to.
#[allow(clippy::wildcard_enum_match_arm, reason = "a name is text or is not there")]
fn ranges(answer: &Value, asked: &str) -> Option<Vec<Range>> {
    let Value::Array(entries) = answer else { return None };
    let read = |entry: &Value| -> Option<Range> {
        let Value::Array(entry) = entry else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(owner), ..] = entry.as_slice()
        else {
            return None;
        };
        let [host, Value::Int(port), ..] = owner.as_slice() else { return None };
        // A node that does not know its own name sends none.
        let host = match host {
            Value::BulkString(host) => std::str::from_utf8(host).ok()?,
            _ => "",
        };
        let host = if known(host) { host } else { asked };
        let (first, last) = (usize::try_from(*first).ok()?, usize::try_from(*last).ok()?);
        let fits = first <= last && last < SLOTS;
        fits.then_some((first, last, host.to_owned(), u16::try_from(*port).ok()?))
    };
    entries.iter().map(read).collect()
}

/// The slot of a key: of what stands in its first pair of braces, as in all keys of ours.
fn slot_of(key: &[u8]) -> usize {
    let behind = |mark: u8, bytes: &[u8]| bytes.iter().position(|&byte| byte == mark);
    let tag = behind(b'{', key).and_then(|open| {
        let rest = &key[open + 1..];
        behind(b'}', rest).map(|close| &rest[..close])
    });
    let tag = tag.filter(|tag| !tag.is_empty()).unwrap_or(key);
    usize::from(crc16(tag)) % SLOTS
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, &byte| {
        (0..8).fold(crc ^ (u16::from(byte) << 8), |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_the_cluster_specification() {
        assert_eq!(crc16(b"123456789"), 0x31C3);
        // As `CLUSTER KEYSLOT` says.
        for (key, slot) in [("foo", 12_182), ("{foo}.bar", 12_182), ("a{foo}{bar}", 12_182)] {
            assert_eq!(slot_of(key.as_bytes()), slot, "{key}");
        }
        assert_eq!(slot_of(b"a{}b"), usize::from(crc16(b"a{}b")) % SLOTS);
    }

    #[test]
    fn a_map_that_makes_no_sense_is_refused() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let entry = |first, last, host: &str, port| {
            let owner = Value::Array(vec![text(host), Value::Int(port), text("id")]);
            Value::Array(vec![Value::Int(first), Value::Int(last), owner])
        };
        let map = |entry| ranges(&Value::Array(vec![entry]), "asked");
        assert_eq!(map(entry(0, 5, "h", 7)), Some(vec![(0, 5, "h".to_owned(), 7)]));
        assert_eq!(map(entry(0, 5, "", 7)), Some(vec![(0, 5, "asked".to_owned(), 7)]));
        assert_eq!(map(entry(0, 16_384, "h", 7)), None);
        assert_eq!(map(entry(-1, 5, "h", 7)), None);
        assert_eq!(map(entry(5, 4, "h", 7)), None);
        assert_eq!(map(entry(0, 5, "h", 70_000)), None);
        assert_eq!(map(Value::Nil), None);
        assert_eq!(ranges(&Value::Okay, "asked"), None);
    }
}
