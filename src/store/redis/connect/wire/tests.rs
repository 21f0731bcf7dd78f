use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};

use super::*;
use crate::store::redis::words::Commands as _;

/// A server that answers each command `*1 $n word` with its word.
async fn echo(mut stream: DuplexStream, pieces: usize) {
    let (mut seen, mut buffer) = (Vec::new(), [0; 4096]);
    while let Ok(read @ 1..) = stream.read(&mut buffer).await {
        seen.extend_from_slice(&buffer[..read]);
        while let Ok(Some((Value::Array(words), length))) = resp::reply(&seen) {
            let Some(Value::BulkString(word)) = words.into_iter().next() else { return };
            let mut reply = format!("${}\r\n", word.len()).into_bytes();
            reply.extend_from_slice(&word);
            reply.extend_from_slice(b"\r\n");
            // In pieces that cut through everything.
            for piece in reply.chunks(pieces) {
                if stream.write_all(piece).await.is_err() {
                    return;
                }
            }
            seen.drain(..length);
        }
    }
}

const LONG: Duration = Duration::from_secs(60);

fn say(wire: &Wire, words: &[&[u8]]) -> Result<Answer, NotTaken> {
    wire.ask(Some(Instant::now() + LONG), |out| {
        for word in words {
            out.words(&[&[word]]);
        }
    })
}

fn word(bytes: &[u8]) -> Value {
    Value::BulkString(bytes.to_vec())
}

#[tokio::test]
async fn every_call_gets_its_own_replies_however_they_are_cut() {
    let (here, there) = duplex(1_000);
    tokio::spawn(echo(there, 7));
    let wire = Wire::over(here);
    let calls = (0..500_usize).map(|number| {
        let (wire, name) = (wire.clone(), number.to_string().into_bytes());
        async move {
            let large = name.repeat(if number % 50 == 0 { 10_000 } else { 1 });
            if number % 3 == 0 {
                let reply = say(&wire, &[&name, &large, b""]).unwrap().await.unwrap();
                let expected = vec![word(&name), word(&large), word(b"")];
                assert_eq!(reply, Value::Array(expected));
            } else {
                assert_eq!(say(&wire, &[&large]).unwrap().await.unwrap(), word(&large));
            }
        }
    });
    join_all(calls).await;
}

#[tokio::test]
async fn the_reply_of_a_call_that_was_dropped_goes_to_nobody() {
    let (here, there) = duplex(1_000);
    tokio::spawn(echo(there, 100));
    let wire = Wire::over(here);
    for _ in 0..100 {
        drop(say(&wire, &[b"dropped", b"too"]).unwrap());
        let kept = say(&wire, &[b"kept"]).unwrap();
        drop(say(&wire, &[b"dropped"]).unwrap());
        assert_eq!(kept.await.unwrap(), word(b"kept"));
    }
}

/// Counts the writes that reach it.
struct Counting<S>(S, Arc<AtomicUsize>);

impl<S: AsyncRead + Unpin> AsyncRead for Counting<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counting<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.1.fetch_add(1, Ordering::Relaxed);
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

#[tokio::test]
async fn what_is_said_within_one_turn_goes_out_in_one_piece() {
    let (here, there) = duplex(1 << 20);
    tokio::spawn(echo(there, 100));
    let writes = Arc::new(AtomicUsize::new(0));
    let wire = Wire::over(Counting(here, Arc::clone(&writes)));
    // Tasks that are ready together, the last of which is behind the one that writes.
    let calls = (0..50).map(|_| {
        let wire = wire.clone();
        tokio::spawn(async move { say(&wire, &[b"word"]).unwrap().await.unwrap() })
    });
    for reply in join_all(calls).await {
        assert_eq!(reply.unwrap(), word(b"word"));
    }
    assert_eq!(writes.load(Ordering::Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_lot_that_is_said_within_one_turn_begins_to_go_out_before_it_is_over() {
    let (here, there) = duplex(1 << 20);
    let writes = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&writes);
    let all = async move {
        tokio::spawn(echo(there, 100));
        let wire = Wire::over(Counting(here, counted));
        let calls = (0..4 * ENOUGH).map(|_| {
            let wire = wire.clone();
            tokio::spawn(async move { say(&wire, &[b"word"]).unwrap().await.unwrap() })
        });
        for reply in join_all(calls).await {
            assert_eq!(reply.unwrap(), word(b"word"));
        }
    };
    // On the one worker, whose tasks are all ready before the first is polled.
    tokio::spawn(all).await.unwrap();
    // Four, but for what the order of the scheduler adds to one and takes from another. All in one piece would be one.
    let writes = writes.load(Ordering::Relaxed);
    assert!((3..=6).contains(&writes), "{writes}");
}

#[tokio::test]
async fn a_connection_that_ends_fails_those_who_wait_and_takes_no_more() {
    let (here, mut there) = duplex(1_000);
    let wire = Wire::over(here);
    let waiting = say(&wire, &[b"a"]).unwrap();
    let mut buffer = [0; 100];
    let _ = there.read(&mut buffer).await.unwrap();
    drop(there);
    let error = waiting.await.unwrap_err();
    assert!(matches!(&error, Unheard::Lost(error) if error.is_io_error()), "{error:?}");
    assert!(wire.has_ended());
    assert!(matches!(say(&wire, &[b"b"]), Err(NotTaken::Ended)));
}

#[tokio::test]
async fn what_is_no_reply_or_was_not_asked_for_ends_the_connection() {
    for nonsense in [&b"HTTP/1.1 400 Bad Request\r\n"[..], b":1\r\n:2\r\n", b"*9\r\n:1\r:2"] {
        let (here, mut there) = duplex(1_000);
        let wire = Wire::over(here);
        let waiting = say(&wire, &[b"a"]).unwrap();
        there.write_all(nonsense).await.unwrap();
        let reply = waiting.await;
        let later = say(&wire, &[b"b"]);
        let later = match later {
            Ok(answer) => answer.await.is_err(),
            Err(_) => true,
        };
        assert!(later, "{nonsense:?}: {reply:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn every_call_is_told_when_its_time_is_over_and_later_ones_get_their_own_replies() {
    let (here, mut there) = duplex(1_000_000);
    let wire = Wire::over(here);
    let start = Instant::now();
    let asked = |after: u64, word: &'static [u8]| {
        let wire = wire.clone();
        async move {
            sleep_until(start + Duration::from_millis(after)).await;
            let until = Instant::now() + Duration::from_millis(600);
            let answer = wire.ask(Some(until), |out| out.words(&[&[word]])).unwrap().await;
            (answer, start.elapsed().as_millis())
        }
    };
    let echo = async {
        sleep_until(start + Duration::from_millis(1_000)).await;
        there.write_all(b":1\r\n:2\r\n:3\r\n").await.unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        there.write_all(b":4\r\n").await.unwrap();
    };
    let asked = async {
        tokio::join!(asked(0, b"1"), asked(300, b"2"), asked(700, b"3"), asked(5_900, b"4"))
    };
    let (calls, ()) = tokio::join!(asked, echo);
    assert!(matches!(calls.0, (Err(Unheard::Late), 600..=602)), "{:?}", calls.0);
    assert!(matches!(calls.1, (Err(Unheard::Late), 900..=902)), "{:?}", calls.1);
    assert!(matches!(calls.2, (Ok(Value::Int(3)), 1_000..=1_002)), "{:?}", calls.2);
    assert!(matches!(calls.3, (Ok(Value::Int(4)), 6_000..=6_002)), "{:?}", calls.3);
}

#[tokio::test(start_paused = true)]
async fn a_question_before_a_call_changes_nothing_about_its_time() {
    for answered in [true, false] {
        let (here, mut there) = duplex(1_000);
        let wire = Wire::over(here);
        let question = wire.ask(None, |out| out.words(&[&[b"question"]])).unwrap();
        if answered {
            let mut said = [0; 100];
            let _ = there.read(&mut said).await.unwrap();
            there.write_all(b":1\r\n").await.unwrap();
            assert!(matches!(question.await, Ok(Value::Int(1))));
        }
        let start = Instant::now();
        let until = start + Duration::from_millis(600);
        let late = wire.ask(Some(until), |out| out.words(&[&[b"call"]])).unwrap().await;
        assert!(matches!(late, Err(Unheard::Late)), "{answered}: {late:?}");
        assert!((600..=602).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn calls_that_cannot_be_written_are_told_too() {
    let (here, _there) = duplex(10);
    let wire = Wire::over(here);
    let start = Instant::now();
    let calls = (0..5_u64).map(|number| {
        let wire = wire.clone();
        async move {
            tokio::time::sleep(Duration::from_millis(100 * number)).await;
            let until = Instant::now() + Duration::from_millis(600);
            let late = wire.ask(Some(until), |out| out.words(&[&[&[0; 100]]])).unwrap().await;
            assert!(matches!(late, Err(Unheard::Late)), "{late:?}");
            let told = u64::try_from(start.elapsed().as_millis()).unwrap() - 100 * number;
            assert!((600..=602).contains(&told), "{told}");
        }
    });
    join_all(calls).await;
}

#[tokio::test]
async fn a_connection_takes_so_many_calls_and_no_more() {
    let (here, _there) = duplex(1_000);
    let wire = Wire::over(here);
    let waiting: Vec<_> = (0..CALLS_MAX).map(|_| say(&wire, &[b"a"]).unwrap()).collect();
    assert!(matches!(say(&wire, &[b"b"]), Err(NotTaken::TooMany)));
    drop(waiting);
    // And so many bytes, while the other side reads nothing.
    let (here, _there) = duplex(1_000);
    let wire = Wire::over(here);
    let large = vec![0; UNSENT_MAX];
    let _first = say(&wire, &[&large]).unwrap();
    assert!(matches!(say(&wire, &[b"b"]), Err(NotTaken::TooMany)));
}
