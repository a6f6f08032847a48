//! Continues a text in Rust, over the C interface: `tokens MODEL COUNT ID...` prints COUNT further token ids as they come.
//!
//! The module `lowbit` is what a program would keep: types that free what they own, and errors as sentences.

mod lowbit {
    use std::ffi::{c_void, CStr, CString};
    use std::os::raw::{c_char, c_int};
    use std::ptr::{null, null_mut};

    #[repr(C)]
    struct Message([c_char; 320]);

    // Of <lowbit/plan/lowbit.h>. Options that are NULL are the defaults.
    #[link(name = "lowbit")]
    extern "C" {
        fn lowbit_open(path: *const c_char, options: *const c_void, model: *mut *mut c_void, error: *mut Message) -> c_int;
        fn lowbit_close(model: *mut c_void);
        fn lowbit_vocabulary(model: *const c_void) -> i64;
        fn lowbit_stop_tokens(model: *const c_void, tokens: *mut i64, most: usize) -> usize;
        fn lowbit_text_new(model: *const c_void, options: *const c_void, text: *mut *mut c_void, error: *mut Message) -> c_int;
        fn lowbit_text_free(text: *mut c_void);
        fn lowbit_feed(
            model: *mut c_void, text: *mut c_void, tokens: *const i64, count: i64, logits: *mut f32, error: *mut Message,
        ) -> c_int;
        fn lowbit_sample(
            logits: *const f32, vocabulary: i64, options: *const c_void, random: *mut [u64; 4], token: *mut i64,
            error: *mut Message,
        ) -> c_int;
    }

    fn call(function: impl FnOnce(*mut Message) -> c_int) -> Result<(), String> {
        let mut error = Message([0; 320]);
        if function(&mut error) == 0 {
            return Ok(());
        }
        Err(unsafe { CStr::from_ptr(error.0.as_ptr()) }.to_string_lossy().into_owned())
    }

    pub struct Model(*mut c_void);

    impl Model {
        /// Opens lowbit.plan in a directory.
        pub fn open(path: &str) -> Result<Model, String> {
            let name = CString::new(path).map_err(|error| error.to_string())?;
            let mut model = null_mut();
            call(|error| unsafe { lowbit_open(name.as_ptr(), null(), &mut model, error) })?;
            Ok(Model(model))
        }

        pub fn stop_tokens(&self) -> Vec<i64> {
            let mut tokens = vec![0; unsafe { lowbit_stop_tokens(self.0, null_mut(), 0) }];
            unsafe { lowbit_stop_tokens(self.0, tokens.as_mut_ptr(), tokens.len()) };
            tokens
        }

        pub fn begin(&self) -> Result<Text<'_>, String> {
            let mut text = null_mut();
            call(|error| unsafe { lowbit_text_new(self.0, null(), &mut text, error) })?;
            Ok(Text { model: self, text, logits: vec![0.0; unsafe { lowbit_vocabulary(self.0) } as usize], random: [0; 4] })
        }
    }

    impl Drop for Model {
        fn drop(&mut self) {
            unsafe { lowbit_close(self.0) }
        }
    }

    pub struct Text<'a> {
        model: &'a Model,
        text: *mut c_void,
        logits: Vec<f32>,
        random: [u64; 4], // needs no seed for the most likely token
    }

    impl Text<'_> {
        /// Adds tokens, and returns the most likely next one.
        pub fn next(&mut self, tokens: &[i64]) -> Result<i64, String> {
            let (logits, count) = (self.logits.as_mut_ptr(), tokens.len() as i64);
            call(|error| unsafe { lowbit_feed(self.model.0, self.text, tokens.as_ptr(), count, logits, error) })?;
            let (random, vocabulary, mut token) = (&mut self.random, self.logits.len() as i64, 0);
            call(|error| unsafe { lowbit_sample(logits, vocabulary, null(), random, &mut token, error) })?;
            Ok(token)
        }
    }

    impl Drop for Text<'_> {
        fn drop(&mut self) {
            unsafe { lowbit_text_free(self.text) }
        }
    }
}

fn run(arguments: &[String]) -> Result<(), String> {
    if arguments.len() < 3 {
        return Err("usage: tokens MODEL COUNT ID...".into());
    }
    let number = |text: &String| text.parse::<i64>().map_err(|_| format!("'{text}' is not a number"));
    let mut ids = arguments[2..].iter().map(number).collect::<Result<Vec<_>, _>>()?;
    let model = lowbit::Model::open(&arguments[0])?;
    let stop = model.stop_tokens();
    let mut text = model.begin()?;
    for _ in 0..number(&arguments[1])? {
        let token = text.next(&ids)?;
        if stop.contains(&token) {
            break;
        }
        println!("{token}");
        ids = vec![token];
    }
    Ok(())
}

fn main() {
    let arguments = std::env::args().skip(1).collect::<Vec<_>>();
    if let Err(message) = run(&arguments) {
        eprintln!("tokens: {message}");
        std::process::exit(1);
    }
}
