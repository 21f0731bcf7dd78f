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
    Full,
}

impl Kind {
    /// What counts as the same fault when one asks if it was hit.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kill(_) => "SIGKILL",
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
            Self::Full => "Redis full",
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
            Kind::Kill(server) | Kind::Stop(server) => write!(f, "server {}: ", server + 1)?,
            Kind::Cut(server, ..)
            | Kind::Swallow(server, _)
            | Kind::Slow(server, ..)
            | Kind::Refuse(server) => write!(f, "between server {} and Redis: ", server + 1)?,
            Kind::KillClients
            | Kind::PauseWrites
            | Kind::DebugSleep
            | Kind::FlushScripts
            | Kind::Freeze
            | Kind::Full => write!(f, "Redis: ")?,
        }
        write!(f, "{}", self.kind.name())?;
        match self.kind {
            Kind::Cut(_, _, bytes) => write!(f, " after {bytes} bytes")?,
            Kind::Slow(_, _, by) => write!(f, " by {} ms", by.as_millis())?,
            _ => {}
        }
        write!(f, ", {} ms", self.lasts.as_millis())
    }
}

/// Where a fault is: what goes wrong in one place does so one after the other, and at the same time as in the
/// other place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Place {
    /// The servers, and what lies between them and Redis.
    Servers,
    Redis,
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
            Place::Redis => vec![
                Kind::KillClients,
                Kind::PauseWrites,
                Kind::DebugSleep,
                Kind::FlushScripts,
                Kind::Freeze,
                Kind::Full,
                Kind::FlushScripts,
            ],
            Place::Servers => {
                let mut kinds = vec![Kind::Kill(0), Kind::Kill(1), Kind::Stop(0), Kind::Stop(1)];
                for way in [Way::Up, Way::Down] {
                    kinds.push(Kind::Cut(
                        random.random_range(0..2),
                        way,
                        random.random_range(0..200),
                    ));
                    kinds.push(Kind::Swallow(random.random_range(0..2), way));
                    let by = ms(random.random_range(20..200));
                    kinds.push(Kind::Slow(random.random_range(0..2), way, by));
                }
                kinds.push(Kind::Refuse(random.random_range(0..2)));
                kinds
            }
        };
        kinds.shuffle(random);
        let mut faults = Vec::new();
        for kind in kinds {
            let at = self.over + ms(random.random_range(50..300));
            let lasts = match kind {
                Kind::Kill(_) | Kind::KillClients | Kind::FlushScripts => Duration::ZERO,
                // Past a lease.
                Kind::Stop(_) => ms(random.random_range(700..1_200)),
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
        for place in [Place::Servers, Place::Redis] {
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
