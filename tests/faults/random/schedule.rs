//! Which fault comes when: dealt from a seed like cards, so that each comes once before any comes again.

use std::fmt;
use std::time::Duration;

use rand::Rng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

use crate::line::Way;

/// What goes wrong. A number is the server that it hits: the first or the second.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    Kill(usize),
    /// It is told to stop, and ends what it has begun.
    Terminate(usize),
    Stop(usize),
    /// The connection is cut after so many bytes.
    Cut(usize, Way, usize),
    Swallow(usize, Way),
    Slow(usize, Way, Duration),
    Refuse(usize),
    KillClients,
    PauseWrites,
    DebugSleep,
    FlushScripts,
    Freeze,
    /// Frozen for longer than a server tries to record an answer before it gives it.
    Outage,
    Full,
    /// The primary is killed, and comes back as a replica of the next one. In a cluster of this part of it.
    KillPrimary(usize),
    /// A replica is frozen, so that too few have what is written.
    StopReplica(usize),
    /// Slots are moved to another master, and back.
    MoveSlots(usize),
}

impl Kind {
    /// What counts as the same fault when one asks if it was hit.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kill(_) => "SIGKILL",
            Self::Terminate(_) => "SIGTERM",
            Self::Stop(_) => "SIGSTOP",
            Self::Cut(_, Way::Up, _) => "cut on the way up",
            Self::Cut(_, Way::Down, _) => "cut on the way down",
            Self::Swallow(_, Way::Up) => "swallowed on the way up",
            Self::Swallow(_, Way::Down) => "swallowed on the way down",
            Self::Slow(_, Way::Up, _) => "slow on the way up",
            Self::Slow(_, Way::Down, _) => "slow on the way down",
            Self::Refuse(_) => "refused",
            Self::KillClients => "CLIENT KILL",
            Self::PauseWrites => "CLIENT PAUSE",
            Self::DebugSleep => "DEBUG SLEEP",
            Self::FlushScripts => "SCRIPT FLUSH",
            Self::Freeze => "Redis frozen",
            Self::Outage => "Redis frozen for long",
            Self::Full => "Redis full",
            Self::KillPrimary(_) => "failover",
            Self::StopReplica(_) => "short WAIT",
            Self::MoveSlots(_) => "slots moved",
        }
    }
}

/// A fault, when it comes, and for how long it stays.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Fault {
    pub(crate) at: Duration,
    pub(crate) kind: Kind,
    pub(crate) lasts: Duration,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:8.3} s  ", self.at.as_secs_f64())?;
        match self.kind {
            Kind::Kill(server) | Kind::Terminate(server) | Kind::Stop(server) => {
                write!(f, "server {}: ", server + 1)?
            }
            Kind::Cut(server, ..)
            | Kind::Swallow(server, _)
            | Kind::Slow(server, ..)
            | Kind::Refuse(server) => write!(f, "between server {} and Redis: ", server + 1)?,
            Kind::KillClients
            | Kind::PauseWrites
            | Kind::DebugSleep
            | Kind::FlushScripts
            | Kind::Freeze
            | Kind::Outage
            | Kind::Full
            | Kind::KillPrimary(_)
            | Kind::StopReplica(_)
            | Kind::MoveSlots(_) => write!(f, "Redis: ")?,
        }
        write!(f, "{}", self.kind.name())?;
        match self.kind {
            Kind::Cut(_, _, bytes) => write!(f, " after {bytes} bytes")?,
            Kind::Slow(_, _, by) => write!(f, " by {} ms", by.as_millis())?,
            Kind::KillPrimary(which) | Kind::StopReplica(which) | Kind::MoveSlots(which) => {
                write!(f, " (number {which})")?;
            }
            _ => {}
        }
        write!(f, ", {} ms", self.lasts.as_millis())
    }
}

/// Where a fault is: what goes wrong in one place does so one after the other, and at the same time as in the
/// other place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Place {
    /// The servers, and what lies between them and Redis if there is a proxy.
    Servers {
        behind_proxies: bool,
    },
    /// One Redis; with times in which it is away for long, if that is claimed.
    Redis {
        outages: bool,
    },
    /// A primary with replicas, and Sentinels.
    Sentinels,
    Cluster,
}

/// An endless row of faults.
pub(crate) struct Schedule {
    place: Place,
    random: StdRng,
    /// When the last one is over.
    over: Duration,
}

impl Schedule {
    pub(crate) fn new(place: Place, random: StdRng) -> Self {
        Self { place, random, over: Duration::from_millis(300) }
    }

    /// The next faults, each kind once.
    pub(crate) fn deal(&mut self) -> Vec<Fault> {
        let random = &mut self.random;
        let mut kinds = match self.place {
            Place::Redis { outages } => {
                let mut kinds = vec![
                    Kind::KillClients,
                    Kind::PauseWrites,
                    Kind::DebugSleep,
                    Kind::FlushScripts,
                    Kind::Freeze,
                    Kind::Full,
                    Kind::FlushScripts,
                ];
                kinds.extend(outages.then_some(Kind::Outage));
                kinds
            }
            Place::Sentinels | Place::Cluster => {
                let mut which = || random.random_range(0..6);
                let mut kinds = vec![
                    Kind::KillPrimary(which()),
                    Kind::StopReplica(which()),
                    Kind::StopReplica(which()),
                    Kind::KillClients,
                    Kind::FlushScripts,
                    Kind::Freeze,
                ];
                if self.place == Place::Cluster {
                    kinds.push(Kind::MoveSlots(which()));
                }
                kinds
            }
            Place::Servers { behind_proxies } => {
                let mut kinds: Vec<_> = (0..2)
                    .flat_map(|server| {
                        [Kind::Kill(server), Kind::Terminate(server), Kind::Stop(server)]
                    })
                    .collect();
                for way in [Way::Up, Way::Down] {
                    if !behind_proxies {
                        break;
                    }
                    kinds.push(Kind::Cut(
                        random.random_range(0..2),
                        way,
                        random.random_range(0..200),
                    ));
                    kinds.push(Kind::Swallow(random.random_range(0..2), way));
                    let by = ms(random.random_range(20..200));
                    kinds.push(Kind::Slow(random.random_range(0..2), way, by));
                }
                if behind_proxies {
                    kinds.push(Kind::Refuse(random.random_range(0..2)));
                }
                kinds
            }
        };
        kinds.shuffle(random);
        let mut faults = Vec::new();
        for kind in kinds {
            let at = self.over + ms(random.random_range(50..300));
            let lasts = match kind {
                Kind::Kill(_)
                | Kind::Terminate(_)
                | Kind::KillClients
                | Kind::FlushScripts
                | Kind::KillPrimary(_)
                | Kind::MoveSlots(_) => Duration::ZERO,
                Kind::Outage => ms(random.random_range(4_500..5_000)),
                // Longer than a WAIT, and too short to be given up.
                Kind::StopReplica(_) => ms(random.random_range(900..1_300)),
                // Past a lease, so that somebody else finds the key before its handler has ended.
                Kind::Stop(_) => ms(random.random_range(900..1_400)),
                _ => ms(random.random_range(200..900)),
            };
            self.over = at + lasts;
            faults.push(Fault { at, kind, lasts });
        }
        faults
    }
}

fn ms(number: u64) -> Duration {
    Duration::from_millis(number)
}

mod tests {
    use std::collections::BTreeSet;

    use rand::SeedableRng as _;

    use super::*;

    #[test]
    fn a_seed_deals_the_same_faults_again_and_each_kind_before_any_comes_twice() {
        let places = [
            Place::Servers { behind_proxies: true },
            Place::Servers { behind_proxies: false },
            Place::Redis { outages: true },
            Place::Redis { outages: false },
            Place::Sentinels,
            Place::Cluster,
        ];
        for place in places {
            let schedule = |seed| Schedule::new(place, StdRng::seed_from_u64(seed));
            let (mut one, mut two, mut other) = (schedule(7), schedule(7), schedule(8));
            let (first, again) = (one.deal(), two.deal());
            assert_eq!(first, again);
            assert_ne!(first, other.deal());
            let second = one.deal();
            let names = |faults: &[Fault]| -> BTreeSet<_> {
                faults.iter().map(|fault| fault.kind.name()).collect()
            };
            assert_eq!(names(&first), names(&second));
            let all: Vec<_> = first.iter().chain(&second).collect();
            assert!(all.windows(2).all(|pair| pair[0].at + pair[0].lasts < pair[1].at));
        }
    }

    #[test]
    fn a_fault_is_printed_with_its_time_and_its_target() {
        let fault =
            Fault { at: ms(12_345), kind: Kind::Slow(1, Way::Down, ms(80)), lasts: ms(500) };
        let line = "  12.345 s  between server 2 and Redis: slow on the way down by 80 ms, 500 ms";
        assert_eq!(fault.to_string(), line);
    }
}
