#!lua name=outrider_ngrams_4
-- The Functions that keep the tiers inside Redis. layout.py has the keys, fields and values;
-- outrider.core.retrieval.tiers.LocalTiers defines what a lookup finds, and the tests compare the two.
--
-- A Function is one command: Redis answers nobody else while it runs. Every loop here is bounded by its arguments,
-- which store.py cuts to size, or by a constant below. All keys that a Function uses are given to it as KEYS, as a
-- cluster demands. Chance (HRANDFIELD) is no harm: the log and the replicas of Redis get the writes, not the call.
--
-- Writes say what a value becomes, not what is added to it. A Redis that is killed while it writes its append-only file
-- may leave half a call there. The next start ignores that half but does not remove it, and a later start runs it
-- together with the call after it, which is often the same call, sent again.
--
-- The library is replaced by name: whoever changes what a Function does, its arguments or its reply changes the number
-- in the names, here and in layout.py, so that servers of two versions can share a Redis.

local ENTRY = 8            -- bytes of a follower: token id and count, 4 bytes each
local MAX_EVICTED = 256    -- n-grams dropped in one call
local SAMPLE = 3           -- n-grams looked at for each that is dropped
local MAX_TRIMMED = 256    -- entries of a ring dropped in one call

-- Reading ------------------------------------------------------------------------------------------------------------

-- Follows the most counted tokens within one tier. Returns the answer as layout.continuation_from reads it.
local function walk(key, tier, ngram, followers, longest, max_len, fanout)
  -- Half of all the time is spent here: a local name is a register, a global one is a lookup in a table.
  local call, sub = redis.call, string.sub
  local nodes, others, num_others = {}, '', {0, 0}
  local tail, least, most = ngram, #ngram, 4 * longest
  local length = 0
  repeat
    length = length + 1
    nodes[length] = sub(followers, 1, ENTRY)
    if length <= 2 and #followers > ENTRY then
      local alternatives = sub(followers, ENTRY + 1, ENTRY * fanout[length])
      others, num_others[length] = others .. alternatives, #alternatives / ENTRY
    end
    if length == max_len then
      break
    end
    tail = (#tail < most and tail or sub(tail, 5)) .. sub(followers, 1, 4)
    followers = call('HGET', key, tail)
    for at = 5, #tail - least + 1, 4 do  -- never shorter than the first match
      if followers then
        break
      end
      followers = call('HGET', key, sub(tail, at))
    end
  until not followers
  nodes[length + 1] = others
  return string.char(least / 4, tier, length, num_others[1], num_others[2]) .. table.concat(nodes)
end

-- Looks one context up. `keys` are those of the tiers in order, `tiers` their numbers.
local function lookup_one(keys, tiers, context, max_match_len, longest, max_len, fanout)
  local call, tail = redis.call, context:sub(-4 * max_match_len)
  for n = #tail / 4, 1, -1 do
    local ngram = tail:sub(-4 * n)
    for i = 1, #keys do
      local followers = call('HGET', keys[i], ngram)
      if followers then
        return walk(keys[i], tiers[i], ngram, followers, longest, max_len, fanout)
      end
    end
  end
  return ''
end

-- KEYS: the tenant's prior, the prior of all, then the session's and the scope's tiers. ARGV: one digit for each key,
-- the number of its tier, or 0 = not searched; max_match_len; longest n-gram recorded; longest continuation; fanout, a
-- digit each; then the contexts.
-- Returns which prior there is ('1' the tenant's, '2' that of all, '' none), then one answer for each context.
local function lookup(keys, args)
  local digits, max_match_len, longest, max_len = args[1], tonumber(args[2]), tonumber(args[3]), tonumber(args[4])
  local fanout = {tonumber(args[5]:sub(1, 1)), tonumber(args[5]:sub(2, 2))}
  local prior = redis.call('EXISTS', keys[1]) == 1 and 1 or redis.call('EXISTS', keys[2]) == 1 and 2 or 0
  local found, tiers = {}, {}
  for i = 1, #keys do
    local tier = tonumber(digits:sub(i, i))
    if tier > 0 and (i == prior or (i > 2 and redis.call('EXISTS', keys[i]) == 1)) then
      found[#found + 1], tiers[#tiers + 1] = keys[i], tier
    end
  end
  local answers = {prior == 0 and '' or tostring(prior)}
  for i = 6, #args do
    answers[i - 4] = lookup_one(found, tiers, args[i], max_match_len, longest, max_len, fanout)
  end
  return answers
end

-- Writing ------------------------------------------------------------------------------------------------------------

-- Followers, the token counted once more. The most counted first, the latest first among equals.
local function count(followers, token, max_followers)
  local times = 1
  for at = 1, #followers, ENTRY do
    if followers:sub(at, at + 3) == token then
      times = struct.unpack('<I4', followers, at + 4) + 1
      followers = followers:sub(1, at - 1) .. followers:sub(at + ENTRY)
      break
    end
  end
  if times == 1 then
    followers = followers:sub(1, ENTRY * (max_followers - 1))
  end
  local at = 1
  while at < #followers and struct.unpack('<I4', followers, at + 4) > times do
    at = at + ENTRY
  end
  return followers:sub(1, at - 1) .. token .. struct.pack('<I4', times) .. followers:sub(at)
end

-- Counts the tokens of `stream` from byte `start` on as followers of the n-grams before them.
local function learn(key, stream, start, max_match_len, max_followers)
  local changed = {}
  for at = math.max(start, 5), #stream, 4 do
    local token = stream:sub(at, at + 3)
    for n = 1, math.min(max_match_len, (at - 1) / 4) do
      local ngram = stream:sub(at - 4 * n, at - 1)
      changed[ngram] = count(changed[ngram] or redis.call('HGET', key, ngram) or '', token, max_followers)
    end
  end
  -- One write for each n-gram that changed, however often it occurs.
  for ngram, followers in pairs(changed) do
    redis.call('HSET', key, ngram, followers)
  end
end

-- Drops n-grams beyond the cap: of a sample, those whose best follower is the least counted. To sort all of them would
-- hold Redis up; as in its own eviction, a sample of a few for each is nearly as good.
local function evict(key, max_ngrams)
  local over = math.min(redis.call('HLEN', key) - max_ngrams, MAX_EVICTED)
  if over <= 0 then
    return
  end
  local sample = redis.call('HRANDFIELD', key, SAMPLE * over, 'WITHVALUES')
  local ngrams = {}
  for i = 1, #sample, 2 do
    ngrams[#ngrams + 1] = {struct.unpack('<I4', sample[i + 1], 5), sample[i]}
  end
  table.sort(ngrams, function(a, b) return a[1] < b[1] end)
  local least = {}
  for i = 1, math.min(over, #ngrams) do
    least[i] = ngrams[i][2]
  end
  redis.call('HDEL', key, unpack(least))
end

-- KEYS: tokens, dynamic, rejected; if the session contributes also shared, changes. ARGV: position of the first token,
-- tokens, max_match_len, max_followers, seconds a session lives, most tokens that a session learns, seconds the shared
-- tier lives, most n-grams in it, most entries of its changes; then the context and the tokens of each refused draft.
-- Returns the session's position, and 1 if all tokens were there already: then nothing is stored.
local function record(keys, args)
  local base, tokens = 4 * tonumber(args[1]), args[2]
  local max_match_len, max_followers, max_len = tonumber(args[3]), tonumber(args[4]), 4 * tonumber(args[6])
  local stored = redis.call('STRLEN', keys[1])
  if base > stored then
    return {stored / 4, 0}
  end
  local size, new = base + #tokens, nil
  if #tokens > 0 and size <= stored then
    return {stored / 4, 1}  -- a request that was sent again after its answer was lost
  end
  if size > stored then
    if stored == 0 then
      redis.call('UNLINK', keys[2])  -- of a stream whose tokens were evicted
    end
    local added = tokens:sub(stored - base + 1)
    local context = stored > 0 and redis.call('GETRANGE', keys[1], math.max(0, stored - 4 * max_match_len), -1) or ''
    local stream = context .. added
    redis.call('SETRANGE', keys[1], stored, added)
    if stored < max_len then
      learn(keys[2], stream:sub(1, #context + max_len - stored), #context + 1, max_match_len, max_followers)
    end
    if keys[4] then
      learn(keys[4], stream, #context + 1, max_match_len, max_followers)
      evict(keys[4], tonumber(args[8]))
      redis.call('EXPIRE', keys[4], args[7])
    end
    stored, new = size, {context, added}
  end
  if stored <= max_len and redis.call('HLEN', keys[3]) <= max_len then  -- four fields a token are plenty
    for i = 10, #args, 2 do
      local context = args[i]:sub(-4 * max_match_len)
      learn(keys[3], context .. args[i + 1], #context + 1, max_match_len, max_followers)
    end
  end
  for i = 1, 3 do
    redis.call('EXPIRE', keys[i], args[5])
  end
  if new and keys[4] then  -- last: the one write that adds
    redis.call('XADD', keys[5], 'MAXLEN', '~', args[9], '*', 'context', new[1], 'tokens', new[2])
    redis.call('EXPIRE', keys[5], args[7])
  end
  return {stored / 4, 0}
end

-- Adds a string of `size` bytes as one document, and drops the oldest entries beyond the capacity.
local function add_document(ring, tokens, size, capacity, piece, ttl)
  local last = redis.call('XREVRANGE', ring, '+', '-', 'COUNT', 1)[1]
  local stop = last and tonumber(last[2][2]) or 0
  for at = math.max(0, size - 4 * capacity), size - 1, 4 * piece do
    local part = redis.call('GETRANGE', tokens, at, at + 4 * piece - 1)
    stop = stop + #part / 4
    redis.call('XADD', ring, '*', 'end', stop, 'open', at + 4 * piece < size and 1 or 0, 'tokens', part)
  end
  for _ = 1, MAX_TRIMMED do
    local first = redis.call('XRANGE', ring, '-', '+', 'COUNT', 1)[1]
    if not first or stop - tonumber(first[2][2]) + #first[2][6] / 4 <= capacity then
      break
    end
    redis.call('XDEL', ring, first[1])
  end
  redis.call('EXPIRE', ring, ttl)
end

-- KEYS: tokens, dynamic, rejected; if the session contributes also ring. ARGV: the session's position, the ring's
-- capacity, most tokens in one entry, seconds the ring lives. Returns the session's position: if it is another, nothing
-- was done.
local function end_session(keys, args)
  local stored = redis.call('STRLEN', keys[1])
  if stored > 0 and stored ~= 4 * tonumber(args[1]) then
    return stored / 4
  end
  if keys[4] and stored > 0 then
    add_document(keys[4], keys[1], stored, tonumber(args[2]), tonumber(args[3]), args[4])
  end
  redis.call('UNLINK', keys[1], keys[2], keys[3])
  return tonumber(args[1])
end

-- KEYS: loading, loading:documents, prior, documents, info, changes. ARGV: n-grams that it must have, tokens, version,
-- most entries of its changes. Returns 1; 0 = what was loaded is not all there, and nothing was done.
local function switch_prior(keys, args)
  if redis.call('HLEN', keys[1]) ~= tonumber(args[1]) or redis.call('EXISTS', keys[2]) == 0 then
    return 0
  end
  redis.call('UNLINK', keys[3], keys[4])  -- RENAME would free the old value here and now; UNLINK leaves it to a thread
  for i = 1, 2 do
    redis.call('RENAME', keys[i], keys[i + 2])
    redis.call('PERSIST', keys[i + 2])
  end
  redis.call('HSET', keys[5], 'version', args[3], 'num_tokens', args[2], 'num_ngrams', args[1])
  redis.call('XADD', keys[6], 'MAXLEN', args[4], '*', 'version', args[3])
  redis.call('PERSIST', keys[6])
  return 1
end

-- KEYS: prior, documents, info, changes. ARGV: seconds that its changes live on. Returns 1; 0 = there was none.
local function delete_prior(keys, args)
  if redis.call('UNLINK', keys[1], keys[2], keys[3]) == 0 then
    return 0
  end
  redis.call('XADD', keys[4], '*', 'version', '')
  redis.call('EXPIRE', keys[4], args[1])
  return 1
end

redis.register_function{function_name = 'outrider_lookup_4', callback = lookup, flags = {'no-writes'}}
redis.register_function('outrider_record_4', record)
redis.register_function('outrider_switch_prior_4', switch_prior)
-- These two make room: they must work when there is none.
redis.register_function{function_name = 'outrider_end_session_4', callback = end_session, flags = {'allow-oom'}}
redis.register_function{function_name = 'outrider_delete_prior_4', callback = delete_prior, flags = {'allow-oom'}}
