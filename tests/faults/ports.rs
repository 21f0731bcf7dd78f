//! Every test here starts servers on ports that were free a moment ago: what happens where one is not any more.

use std::cell::Cell;
use std::net::TcpListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::redis::{PORTS_TRIED, RedisServer, first_port, free_port};

/// Starts a Redis on these ports, one after the other, and gives how many of them it took; or what it said
/// when it gave up.
fn start(ports: &[u16], options: &[&str]) -> (Result<RedisServer, String>, usize) {
    let taken = Cell::new(0);
    let next = || {
        taken.set(taken.get() + 1);
        ports[(taken.get() - 1) % ports.len()]
    };
    let start = || RedisServer::start_on_one_of(next, Path::new("redis-server"), options);
    let began = Instant::now();
    let started = catch_unwind(AssertUnwindSafe(start));
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    let started = started.map_err(|said| match said.downcast::<String>() {
        Ok(said) => *said,
        Err(said) => said.downcast_ref::<&str>().expect("words").to_string(),
    });
    (started, taken.get())
}

#[test]
fn a_server_whose_port_was_taken_before_it_was_bound_starts_on_another_one() {
    // By somebody who takes connections and says nothing; and by a server of another test.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let other = RedisServer::start();
    other.cli(&["set", "whose", "the other's"]);
    let (silent, free) = (silent.local_addr().unwrap().port(), free_port());
    let (started, tried) = start(&[silent, other.port(), other.port(), free], &[]);
    let started = started.unwrap();
    assert_eq!((started.port(), tried), (free, 4));
    assert_eq!(started.cli(&["dbsize"]), "0", "it is the one that was started");
    assert_eq!(other.cli(&["get", "whose"]), "the other's");
}

#[test]
fn where_every_port_is_taken_the_start_gives_up_and_says_so() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let other = RedisServer::start();
    let (started, tried) = start(&[silent.local_addr().unwrap().port(), other.port()], &[]);
    let said = started.unwrap_err();
    assert_eq!((said.as_str(), tried), ("no free port for redis-server", PORTS_TRIED));
}

#[test]
fn a_server_that_ends_for_another_reason_is_not_tried_again() {
    let (started, tried) = start(&[free_port(), free_port()], &["--no-such-option", "1"]);
    let said = started.unwrap_err();
    assert!(said.contains("does not start") && said.contains("no-such-option"), "{said}");
    assert_eq!(tried, 1);
}

#[test]
fn ports_that_are_taken_are_passed_over_and_none_at_all_is_said() {
    let looked = Cell::new(0);
    let third = first_port(|_| {
        looked.set(looked.get() + 1);
        looked.get() == 3
    });
    assert_eq!(looked.get(), 3);
    // A system hands out higher ones, and the bus of a cluster needs one that is higher by ten thousand.
    assert!((20_000..55_000).contains(&third), "{third}");
    let said = catch_unwind(|| first_port(|_| false)).unwrap_err();
    assert_eq!(*said.downcast::<String>().unwrap(), "no free port in 20000..55000");
}
